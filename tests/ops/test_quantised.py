"""Quantised caches: what is stored, and attention, gathers and copies of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.testing import assert_no_cache_clone, assert_within_rounding

from .builders import FLOATS, INDEX_DTYPES, attention_options, copy_strided, make_caches, pairwise, row_id
from .quantised import KINDS, LARGEST, TYPES, append_args, make_quantised, new_scales, poison_of, write_options
from .test_attention import LENGTHS, MASKS
from .test_writing import random_slots, tokens

BOTH = pytest.mark.parametrize("module", [pagedkv_ops, reference], ids=["op", "reference"])
EVERY_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
ATTENTION_GRID = pairwise(
    5,
    k_type=TYPES,
    v_type=TYPES,
    k_kind=KINDS,
    v_kind=KINDS,
    head_size=(13, 32, 64, 80, 96, 128, 256),
    block_size=(1, 3, 16, 64, 544),
    heads=((4, 4), (8, 2), (5, 1), (9, 3), (16, 2)),
    lengths=("decode", "long_decode", "prefill", "chunk", "mixed", "more_queries_than_keys", "about_one_tile"),
    mask=("causal", "full", "window", "wide"),
    dtype=FLOATS,
    v_head_size=(None, 24, 144),
    extras=({}, {"softcap": 2.0}, {"alibi": True, "sinks": True}),
    layout=("nhd", "hnd"),
    strided=(False, True),
    index_dtype=INDEX_DTYPES,
    padding_rows=(0, 3),
    num_splits=(0, 1, 5),
)
WRITE_GRID = pairwise(
    6,
    dtype=TYPES,
    kind=KINDS,
    source=FLOATS,
    head_size=(1, 13, 64, 128, 256),
    block_size=(1, 3, 16, 544),
    num_kv_heads=(1, 2, 5),
    num_tokens=(0, 1, 7, 300),
    layout=("nhd", "hnd", "interleaved"),
    strided=(False, True),
    index_dtype=INDEX_DTYPES,
)


def assert_close_outputs(case, out, lse=None):
    options = {name: value for name, value in case.options.items() if not name.endswith("_scale")}
    plain = type(case)(**{**vars(case), "options": options})
    exact, exact_lse = plain.dense()
    rounded, rounded_lse = zip(*plain.rounded(), strict=True)
    assert_within_rounding(out, exact, *rounded)
    if lse is not None:
        assert_within_rounding(lse, exact_lse, *rounded_lse)


@pytest.mark.parametrize("row", ATTENTION_GRID, ids=row_id)
def test_grid_equals_dense_attention(row):
    """With the log-sum-exp, and with the write of the new tokens."""
    shape = dict(row)
    query_lens, seq_lens = LENGTHS[shape.pop("lengths")]
    options = {**MASKS[shape.pop("mask")], **shape.pop("extras"), "num_splits": shape.pop("num_splits")}
    types, kinds = ((shape.pop(f"k_{name}"), shape.pop(f"v_{name}")) for name in ("type", "kind"))
    options = attention_options(row["heads"][0], **options)
    case, written = make_quantised(types, kinds, query_lens=query_lens, seq_lens=seq_lens, options=options, **shape)
    for attend in (pagedkv_ops.paged_attention_with_lse, reference.paged_attention_with_lse):
        assert_close_outputs(case, *attend(*case.args, **case.options))
    fixed = {name: value for name, value in case.options.items() if not name.endswith("_scale")} | written
    for attend in (pagedkv_ops.paged_attention_append, reference.paged_attention_append):
        assert_close_outputs(case, attend(*append_args(case), **fixed))


@pytest.mark.parametrize("row", WRITE_GRID, ids=row_id)
def test_writes_equal_the_reference(row):
    """Bit for bit, scales too, on caches of poison."""
    block_size, heads = row["block_size"], row["num_kv_heads"]
    num_blocks, dtype = row["num_tokens"] // block_size + 2, row["dtype"]
    shape = (num_blocks, block_size, heads, row["head_size"], row["head_size"])
    caches = make_caches(*shape, dtype, row["layout"], poison_of(dtype))
    new = [tokens(row["num_tokens"], heads, row["head_size"], row["source"], seed, row["strided"]) for seed in (4, 5)]
    for rows in new:
        rows[: rows.size(0) // 2, 0] = 0  # rows of zeros have a scale of 0
    scales = tuple(new_scales(row["kind"], dtype, rows, cache) for rows, cache in zip(new, caches, strict=True))
    scales = tuple(torch.where(scale == 0, 1.0, scale) for scale in scales)
    slots = random_slots(num_blocks * block_size, row["num_tokens"], padding=0.2, seed=3).to(row["index_dtype"])
    results = []
    for write in (pagedkv_ops.write_kv, reference.write_kv):
        own = [copy_strided(tensor) for tensor in (*caches, *scales)]
        write(*new, *own[:2], slots, **write_options((row["kind"],) * 2, own[2:]))
        results.append([tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8) for tensor in own])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def one_row(dtype, values, **scales):
    """Values stored as one token of one head, as float32 times the scale."""
    row = torch.tensor(values).view(1, 1, -1)
    caches = torch.zeros(2, 1, 1, 1, row.size(2), dtype=dtype).unbind()
    return (
        row,
        caches,
        {name: torch.full((1, 1, 1) if name.endswith("cache") else (1,), s) for name, s in scales.items()},
    )


@BOTH
@EVERY_TYPE
def test_fixed_scales_saturate(module, dtype):
    """CASES: 465, 1000 and -1000 are 448, 448 and -448 in float8_e4m3fn."""
    row, caches, scales = one_row(dtype, [465.0, 1e6, -1e6, math.inf, -math.inf, 0.3], k_scale=1.0, v_scale=1.0)
    module.write_kv(row, row, *caches, torch.tensor([0]), **scales)
    most = LARGEST[dtype]
    rounded = 0.0 if dtype == torch.int8 else 0.3125
    first = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0}[dtype]
    assert caches[0].float().flatten().tolist() == [first, most, -most, most, -most, rounded]


def test_float8_saturates_in_a_compiled_graph():
    row, caches, scales = one_row(torch.float8_e4m3fn, [465.0, 1000.0, -1000.0], k_scale=1.0, v_scale=1.0)
    torch.compile(pagedkv_ops.write_kv, fullgraph=True)(row, row, *caches, torch.tensor([0]), **scales)
    assert caches[1].float().flatten().tolist() == [448.0, 448.0, -448.0]


@BOTH
@EVERY_TYPE
def test_a_row_has_the_scale_of_its_largest_finite_magnitude(module, dtype):
    row, caches, scales = one_row(dtype, [4.0, -2.0, math.inf], k_scale_cache=math.nan, v_scale_cache=math.nan)
    module.write_kv(row, row, *caches, torch.tensor([0]), **scales)
    scale = scales["k_scale_cache"].item()
    assert scale == pytest.approx(4.0 / LARGEST[dtype], rel=1e-7)
    stored = (caches[0].float().flatten() * scale).tolist()
    assert stored[0] == stored[2] == pytest.approx(4.0)
    assert stored[1] == pytest.approx(-2.0, abs=0.02)


@BOTH
@EVERY_TYPE
def test_zeros_have_a_scale_of_zero(module, dtype):
    row, caches, scales = one_row(dtype, [0.0, 0.0], k_scale_cache=math.nan, v_scale_cache=math.nan)
    module.write_kv(row, row, *caches, torch.tensor([0]), **scales)
    assert scales["v_scale_cache"].item() == 0
    assert caches[1].float().flatten().tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize("dtype", TYPES[1:], ids=["e4m3", "e5m2"])
def test_nan_stays_nan_in_float8_alone(module, dtype):
    row, caches, scales = one_row(dtype, [2.0, math.nan, 1.0], k_scale_cache=math.nan, v_scale=1.0)
    module.write_kv(row, row, *caches, torch.tensor([0]), **scales)
    for cache, scale in zip(caches, scales.values(), strict=True):
        assert (cache.float().flatten() * scale.item()).isnan().tolist() == [False, True, False]


@BOTH
def test_a_later_scale_does_not_change_an_earlier_token(module):
    """CASES: the first scale wins nothing; a slot that is used again takes the scale of its new token."""
    caches, scale_caches = make_caches(2, 4, 1, 2, 2, torch.int8, fill=0), torch.zeros(2, 2, 4, 1).unbind()
    options = dict(zip(("k_scale_cache", "v_scale_cache"), scale_caches, strict=True))
    table, length, query = torch.tensor([[1]]), torch.tensor([1]), torch.zeros(1, 1, 2)
    for value in (4.0, 0.4):
        token = torch.full((1, 1, 2), value)
        for _layer in range(2):
            out = module.paged_attention_append(
                query, token, token, *caches, torch.tensor([4]), table, length, **options
            )
            torch.testing.assert_close(out, token, rtol=0, atol=0.0016)


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_row_is_stored_as_the_reference_stores_it(values):
    for dtype in TYPES:
        results = []
        for module in (pagedkv_ops, reference):
            row, caches, scales = one_row(dtype, values, k_scale_cache=math.nan, v_scale=0.37)
            module.write_kv(row, row, *caches, torch.tensor([0]), **scales)
            results.append([*(cache.view(torch.int8) for cache in caches), *scales.values()])
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@EVERY_TYPE
def test_quotients_are_rounded_once_for_every_scale(dtype):
    """Bit for bit at the ties between stored numbers and beside them, from the least scale to the largest."""
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = bits[bits.isfinite()].sort().values
    ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    for exponent in (-149, -130, -100, -61, -60, -7, 0, 3, 60, 61, 100):
        scale = torch.rand(1).add_(1).ldexp(torch.tensor(exponent))
        row = (ties * scale).clamp(-3e38, 3e38)
        rows = torch.cat([row, row.nextafter(torch.tensor(math.inf)), row.nextafter(torch.tensor(-math.inf))])
        rows = torch.cat([rows, torch.tensor([-0.0, 1e-45, -1e-40, 3e38, -math.inf])])[None, None]
        stored = []
        for module in (pagedkv_ops, reference):
            caches = torch.zeros(2, 1, 1, 1, rows.size(2), dtype=dtype).unbind()
            module.write_kv(rows, rows, *caches, torch.tensor([0]), k_scale=scale, v_scale=scale)
            stored.append(caches[0].view(torch.uint8))
        torch.testing.assert_close(*stored, rtol=0, atol=0)


@EVERY_TYPE
def test_every_stored_byte_is_read_as_torch_reads_it(dtype):
    """All 256 of them, in attention (decode and prefill) and in a gather, from rows of all lengths of a vector."""
    cache = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 1, 256)
    table, length = torch.tensor([[0]]), torch.tensor([1])
    expected = cache.float().view(256) * 0.5
    for columns in (256, 93, 47, 1):
        value = cache[..., :columns]
        scale = {"v_scale": torch.tensor([0.5]), "k_scale": torch.ones(1)}
        gathered = pagedkv_ops.gather_kv(value, table, length, 2, scale=scale["v_scale"])
        torch.testing.assert_close(gathered[0, 0, 0], expected[:columns], rtol=0, atol=0, equal_nan=True)
        for rows in (1, 40):
            query, starts = torch.zeros(rows, 1, 256), torch.tensor([0, rows])
            out = pagedkv_ops.paged_attention(query, torch.zeros_like(cache), value, table, length, starts, **scale)
            torch.testing.assert_close(out[-1, 0], expected[:columns], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES[1:])
@pytest.mark.parametrize("heads", [1, 2, 4, 9])
def test_nan_in_a_key_reaches_every_head_that_sees_it(dtype, heads):
    for columns in (256, 93, 24):
        key = torch.zeros(1, 2, 1, columns)
        key[0, 1, 0, columns - 1] = math.nan
        caches, query = (key.to(dtype), torch.ones_like(key).to(dtype)), torch.ones(2, heads, columns)
        scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
        lengths = torch.tensor([1, 2])
        out = pagedkv_ops.paged_attention(query, *caches, torch.zeros(2, 1, dtype=torch.int64), lengths, **scales)
        assert out[0].eq(1).all()
        assert out[1].isnan().all()


@EVERY_TYPE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", FLOATS)
def test_gather_gives_what_is_stored_times_its_scale(dtype, kind, out):
    case, _ = make_quantised((dtype, dtype), (kind, kind), query_lens=(1, 1), seq_lens=(5, 9), layout="hnd")
    for module in (pagedkv_ops, reference):
        dense = module.gather_kv(
            case.value_cache, case.block_table, case.seq_lens, 7, scale=case.options["v_scale"], dtype=out
        )
        assert dense.dtype == out
        assert not dense[0, 5:].any()
        for b, length in enumerate((5, 7)):
            torch.testing.assert_close(dense[b, :length], case.values[b][:length].float().to(out), rtol=0, atol=0)


@EVERY_TYPE
def test_copies_and_swaps_take_scales_with_them(dtype):
    case, _ = make_quantised((dtype, dtype), ("token", "token"), query_lens=(1,), seq_lens=(4,))
    tensors = [case.key_cache, case.value_cache, case.options["k_scale"], case.options["v_scale"]]
    source = int(case.block_table[0, 0])
    target = (source + 1) % case.key_cache.size(0)
    before = pagedkv_ops.paged_attention(*case.args, **case.options)
    pagedkv_ops.copy_blocks(tensors, torch.tensor([[source, target]]))
    host = [torch.empty(1, *tensor.shape[1:], dtype=tensor.dtype) for tensor in tensors]
    for tensor, copy in zip(tensors, host, strict=True):
        pagedkv_ops.swap_blocks(tensor, copy, torch.tensor([[target, 0]]))
        tensor.zero_()
        pagedkv_ops.swap_blocks(copy, tensor, torch.tensor([[0, target]]))
    case.block_table[0, 0] = target
    torch.testing.assert_close(pagedkv_ops.paged_attention(*case.args, **case.options), before, rtol=0, atol=0)


@EVERY_TYPE
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(dtype, kind):
    case, written = make_quantised((dtype, TYPES[0]), (kind, "token"), query_lens=(3, 1), seq_lens=(7, 4))
    query, table, lengths, starts = case.args[0], *case.args[3:]
    caches, slots = case.args[1:3], torch.tensor([1, -1, 6, 2])
    new = (torch.randn(4, *case.key_cache.shape[2:]), torch.randn(4, *case.value_cache.shape[2:]))
    calls = {
        "write_kv": ((*new, *caches, slots), written),
        "paged_attention": (case.args, case.options),
        "paged_attention_with_lse": (case.args, case.options),
        "paged_attention_append": ((query, *new, *caches, slots, table, lengths, starts), written),
        "gather_kv": ((caches[0], table, lengths, 8), {"scale": case.options["k_scale"], "dtype": torch.bfloat16}),
        "copy_blocks": (([*caches, *case.options.values()][:2], torch.tensor([[0, 1]])), {}),
    }
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype == torch.int8:  # it compares by a product, which torch has not for float8
        utils.append("test_schema")
    for name, (args, options) in calls.items():
        torch.library.opcheck(getattr(torch.ops.pagedkv, name).default, args, options, test_utils=utils)


@EVERY_TYPE
def test_compiled_steps_clone_neither_caches_nor_scales(dtype):
    caches = [torch.zeros(512, 16, 4, 32, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(512, 4, 16) for _ in range(2)]

    def step(query, new, key_cache, value_cache, k_scale, v_scale, slots, table, lengths):
        options = {"k_scale_cache": k_scale.transpose(1, 2), "v_scale_cache": v_scale.transpose(1, 2)}
        out = query
        for _ in range(2):
            out = out + pagedkv_ops.paged_attention_append(
                out, new, new, key_cache, value_cache, slots, table, lengths, **options
            )
        return out

    new, slots, table = torch.randn(2, 4, 32), torch.tensor([16, 40]), torch.tensor([[1], [2]])
    args = (torch.randn(2, 8, 32), new, *caches, *scales, slots, table, torch.tensor([1, 9]))
    assert_no_cache_clone(step, *args, caches=[*caches, *scales])


def test_warming_asks_for_the_type_of_queries():
    with FakeTensorMode():
        caches = torch.empty(2, 4, 4, 1, 16, dtype=torch.int8, device="cuda").unbind()
    with pytest.raises(RuntimeError, match=r"^warm_up: dtype must be given for caches in int8, got None$"):
        pagedkv_ops.warm_up(*caches, num_heads=1, max_batch=1, max_tokens=1, max_blocks=1)
