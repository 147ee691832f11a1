"""Compiled steps: equal to eager, few graphs, no clone of a cache, and no look at what index tensors hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS
from pagedkv_ops.testing import assert_no_cache_clone, poison

from .bad_inputs import good_call
from .builders import make_case

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 4


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def new_tokens(batch: int, seed: int = 0):
    """query, key, value of one new token per sequence."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, HEAD_SIZE, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))


def layers(num_layers: int, num_blocks: int = 64):
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return [(poison(*shape), poison(*shape)) for _ in range(num_layers)]


def decode(query, key, value, key_cache, value_cache, slots, table, seq_lens):
    pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
    return pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens) * 2


def own_blocks(batch: int, width: int):
    """Row b holds blocks b*width .. b*width+width-1."""
    return torch.arange(batch * width).view(batch, width)


def test_dynamic_batch_and_table_width_need_two_graphs():
    """A batch of one, and all others. Sizes that are equal by chance are taken for one, so none are equal here."""
    compiled = torch.compile(decode, fullgraph=True, dynamic=True)
    (caches,) = layers(1, 97)
    for batch, width in ((1, 7), (3, 7), (5, 6), (6, 9), (1, 9), (10, 5)):
        table = own_blocks(batch, width)
        step = (table[:, 0] * BLOCK_SIZE, table, torch.ones(batch, dtype=torch.int64))
        tokens = new_tokens(batch)
        torch.testing.assert_close(compiled(*tokens, *caches, *step), decode(*tokens, *caches, *step), rtol=0, atol=0)
    assert num_graphs() <= 2


def test_unbacked_batch_and_table_width_need_one_graph():
    compiled = torch.compile(decode, fullgraph=True)
    (caches,) = layers(1)
    for batch, width in ((1, 1), (2, 4), (3, 5), (5, 9), (1, 7), (4, 1)):
        table = own_blocks(batch, width)
        step = (table[:, 0] * BLOCK_SIZE, table, torch.ones(batch, dtype=torch.int64))
        tokens = new_tokens(batch)
        for tensor in (*tokens, *step):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        torch._dynamo.decorators.mark_unbacked(table, 1)
        torch.testing.assert_close(compiled(*tokens, *caches, *step), decode(*tokens, *caches, *step), rtol=0, atol=0)
    assert num_graphs() == 1


def test_contents_of_index_tensors_never_recompile():
    """One graph and one output shape for every table, length, slot and cu_seqlens_q of equal shapes."""

    def step(query, key, value, key_cache, value_cache, *metadata):
        out = pagedkv_ops.paged_attention_append(query, key, value, key_cache, value_cache, *metadata)
        dense = pagedkv_ops.gather_kv(key_cache, metadata[1], metadata[2], 12)
        return out, dense

    compiled = torch.compile(step, fullgraph=True)
    for query_lens, seq_lens in (((4, 2), (4, 2)), ((1, 5), (9, 5)), ((0, 6), (0, 12)), ((2, 1), (2, 10))):
        case = make_case(query_lens=query_lens, seq_lens=seq_lens, padding_rows=6 - sum(query_lens))
        case.block_table = torch.nn.functional.pad(case.block_table, (0, 4 - case.block_table.size(1)))
        case.key_cache, case.value_cache = (
            torch.cat([cache, poison(9 - cache.size(0), *cache.shape[1:])])
            for cache in (case.key_cache, case.value_cache)
        )
        expected = step(*case.append_args())
        actual = compiled(*case.append_args())
        assert [t.shape for t in actual] == [torch.Size([6, 4, 16]), torch.Size([2, 12, 2, 16])]
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert num_graphs() == 1


def model_step(query, key, value, caches, slots, table, seq_lens):
    """Three layers, each on caches of its own."""
    for key_cache, value_cache in caches:
        pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
        query = query + pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens)
    return query


def append_step(query, key, value, caches, slots, table, seq_lens):
    for key_cache, value_cache in caches:
        query = query + pagedkv_ops.paged_attention_append(
            query, key, value, key_cache, value_cache, slots, table, seq_lens
        )
    return query


METADATA = (torch.tensor([4, 8]), torch.tensor([[1], [2]]), torch.tensor([1, 1]))


def pool_step(query, key, value, pools, slots, table, seq_lens):
    """Every layer's pool [2, N, S, Hkv, D] is split inside the graph."""
    return model_step(query, key, value, [(pool[0], pool[1]) for pool in pools], slots, table, seq_lens)


POOLS = [poison(2, 64, BLOCK_SIZE, KV_HEADS, HEAD_SIZE) for _ in range(3)]


@pytest.mark.parametrize(("step", "caches"), [(model_step, layers(3)), (append_step, layers(3)), (pool_step, POOLS)])
def test_layers_are_not_cloned(step, caches):
    assert_no_cache_clone(step, *new_tokens(2), caches, *METADATA)


def test_views_of_one_pool_hold_the_bytes_of_eager(run):
    """Pool [2, 4, 2, 1, 2] of -1, written at slots 3 and 6 through pool[0] and pool[1]."""

    def write(new_keys, new_values, pool, slots):
        pagedkv_ops.write_kv(new_keys, new_values, pool[0], pool[1], slots)

    pool = torch.full((2, 4, 2, 1, 2), -1.0)
    address = pool.data_ptr()
    new = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    run(write, new, 10 * new, pool, torch.tensor([3, 6]))
    expected = torch.full((2, 8, 2), -1.0)
    expected[0, 3], expected[0, 6] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    expected[1] = torch.where(expected[0] > 0, 10 * expected[0], expected[0])
    assert pool.view(2, 8, 2).tolist() == expected.tolist()
    assert pool.data_ptr() == address


def repeated_append(query, key, value, key_cache, value_cache, tables, slots):
    """Three tokens appended to one cache in one graph, each attending to those before."""
    out = query
    for t in range(3):
        out = pagedkv_ops.paged_attention_append(
            out + 0.1 * query,
            key * (t + 1),
            value * (t + 1),
            key_cache,
            value_cache,
            slots + t,
            tables,
            torch.full_like(slots, t + 1),
        )
    return out


def test_append_used_several_times_on_one_cache(run):
    tables, slots = torch.tensor([[1], [2]]), torch.tensor([4, 8])
    (caches,), (expected_caches,) = layers(1), layers(1)
    expected = repeated_append(*new_tokens(2), *expected_caches, tables, slots)
    out = run(repeated_append, *new_tokens(2), *caches, tables, slots)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(caches, expected_caches, equal_nan=True)


def test_append_used_several_times_clones_nothing():
    assert_no_cache_clone(
        repeated_append, *new_tokens(2), *layers(1)[0], torch.tensor([[1], [2]]), torch.tensor([4, 8])
    )


def test_several_write_and_read_rounds_are_right(run):
    """Separate ops on one cache may cost clones but never the order."""

    def rounds(query, key, value, key_cache, value_cache, tables, slots):
        outs = []
        for t in range(3):
            pagedkv_ops.write_kv(key + t, value + t, key_cache, value_cache, slots)  # the same slots again
            outs.append(pagedkv_ops.paged_attention(query, key_cache, value_cache, tables, torch.ones_like(slots)))
        return torch.stack(outs)

    (caches,) = layers(1)
    query, key, value = new_tokens(2)
    out = run(rounds, query, key, value, *caches, torch.tensor([[1], [2]]), torch.tensor([4, 8]))
    for t in range(3):  # one visible token: its value
        torch.testing.assert_close(out[t], (value + t).repeat_interleave(2, dim=1))


def test_prefill_then_decode_through_one_compiled_function():
    """The same compiled function serves prompts and single tokens, with cu_seqlens_q."""

    def step(query, key_cache, value_cache, table, seq_lens, cu_seqlens_q):
        return pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens, cu_seqlens_q)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for query_lens in ((5, 6), (4, 4), (2, 7), (9, 9)):
        case = make_case(query_lens=query_lens, seq_lens=(12, 9))
        torch.testing.assert_close(compiled(*case.args), step(*case.args), rtol=0, atol=0)
    assert num_graphs() == 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_pools_made_outside_work_in_every_mode(run, context):
    caches = layers(1, 8)[0]
    expected = [cache.clone() for cache in caches]
    query, key, value = new_tokens(2)
    decode(query, key, value, *expected, *METADATA)
    with context():
        run(decode, query, key, value, *caches, *METADATA)
    torch.testing.assert_close(list(caches), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(
    pagedkv_ops.backends()["cpu"] == "reference", reason="PyTorch refuses its own in-place ops on inference tensors"
)
def test_pool_made_inside_inference_mode(run):
    with torch.inference_mode():
        caches = layers(1, 8)[0]
    expected = layers(1, 8)[0]
    decode(*new_tokens(2), *expected, *METADATA)
    with torch.no_grad():
        run(decode, *new_tokens(2), *caches, *METADATA)
    torch.testing.assert_close([c.clone() for c in caches], list(expected), rtol=0, atol=0, equal_nan=True)


# What a captured graph needs: nothing on the Python path reads an index tensor, sizes come from shapes.


def traced(name, mode):
    function, call = getattr(pagedkv_ops, name), good_call(name)  # make_fx refuses keyword-only parameters
    return make_fx(lambda *args: function(**dict(zip(call, args, strict=True))), tracing_mode=mode)(
        *call.values()
    ).graph


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_traced_graph_holds_the_op_alone(name, mode):
    """And no output depends on a size that only the contents could give (an unbacked symbol)."""
    graph = traced(name, mode)
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    shape_reads = {"<built-in function getitem>", "aten.sym_size.int"}
    assert [target for target in targets if target not in shape_reads] == [f"pagedkv.{name}.default"]
    for value in tree_leaves([node.meta.get("val") for node in graph.nodes]):
        assert not isinstance(value, torch.Tensor) or not any(str(size).startswith("u") for size in value.shape)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_symbolic_trace_serves_other_shapes(fill):
    served = make_fx(lambda *args: pagedkv_ops.paged_attention_with_lse(*args), tracing_mode="symbolic")(
        *make_case(query_lens=(3, 2), seq_lens=(7, 5)).args
    )
    case = make_case(query_lens=(4, 2), seq_lens=(30, 5), fill=fill)
    torch.testing.assert_close(served(*case.args), pagedkv_ops.paged_attention_with_lse(*case.args), rtol=0, atol=0)
