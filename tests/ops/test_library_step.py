"""The ops on the library's own caches, tables and manager: decode steps, block moves, inference mode."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import pagedkv_ops
from pagedkv import KVCacheManager
from pagedkv.block_table import BlockTable
from pagedkv.cache import LayerSpec, PagedKVCache

HEADS, SPEC, BLOCK_SIZE = 4, LayerSpec(num_kv_heads=2, head_size=16), 4


def step(query, key, value, key_cache, value_cache, slots, table, seq_lens):
    return pagedkv_ops.paged_attention_append(query, key, value, key_cache, value_cache, slots, table, seq_lens) * 2


def new_tokens(batch: int, seed: int):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, 16, generator=rng) for heads in (HEADS, 2, 2)]


def decode(function, cache, manager, table, num_seqs: int, length: int):
    """``length`` tokens for each of ``num_seqs`` new sequences, one per step; the outputs."""
    ids = [f"{num_seqs}-{i}" for i in range(num_seqs)]
    outputs = []
    for seq_id in ids:
        manager.add(seq_id, [])
    for position in range(length):
        for row, seq_id in enumerate(ids):
            manager.append(seq_id, [position])
            assert manager.allocate_slots(seq_id, 1) is not None
            table.set_row(row, manager.block_ids(seq_id))
            manager.commit(seq_id, 1)
        table.fill([position] * num_seqs)
        table.upload()
        metadata = (table.tensors[name][:num_seqs] for name in ("slot_mapping", "block_table", "seq_lens"))
        tokens = new_tokens(num_seqs, position)
        outputs.append(function(*tokens, cache.key_caches[0], cache.value_caches[0], *metadata))
    for row, seq_id in enumerate(ids):
        manager.free(seq_id)
        table.clear_row(row)
    return torch.stack(outputs)


def library(num_blocks: int = 84):
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    return PagedKVCache(num_blocks, BLOCK_SIZE, [SPEC]), manager, BlockTable(5, 16, 5, BLOCK_SIZE)


def test_compiled_decode_needs_two_graphs_and_gives_every_block_back():
    """Lengths 1..64, batches 1, 2, 3, 5, then 1 and 2 again: equal to eager at every step."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, fullgraph=True)
    cache, manager, table = library()
    free = manager.num_free_blocks
    for num_seqs, length in ((1, 64), (2, 64), (3, 64), (5, 64), (1, 10), (2, 40)):
        expected = decode(step, *library(), num_seqs, length)
        actual = decode(compiled, cache, manager, table, num_seqs, length)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert manager.num_free_blocks == free
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_cache_made_inside_inference_mode_works_in_every_mode(run, context):
    with torch.inference_mode():
        cache = PagedKVCache(4, BLOCK_SIZE, [SPEC])
    written = []
    for mode in (torch.no_grad, context):
        key_cache, value_cache = cache.key_caches[0].zero_(), cache.value_caches[0].zero_()
        with mode():
            _, key, value = new_tokens(2, 0)
            run(pagedkv_ops.write_kv, key, value, key_cache, value_cache, torch.tensor([5, 14]))
        written.append((key_cache.clone(), value_cache.clone()))
    torch.testing.assert_close(written[0], written[1], rtol=0, atol=0)
    torch.testing.assert_close(written[0][0][3, 2], new_tokens(2, 0)[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_cache_layouts_give_the_same_results(layout):
    cache = PagedKVCache(6, BLOCK_SIZE, [SPEC], layout=layout)
    assert cache.key_caches[0].shape == (6, BLOCK_SIZE, 2, 16)
    assert cache.key_caches[0].is_contiguous() == (layout == "NHD")
    query, key, value = new_tokens(1, 1)
    step(query, key, value, cache.key_caches[0], cache.value_caches[0], *map(torch.tensor, ([6], [[1]], [1])))
    out = step(query, key, value, cache.key_caches[0], cache.value_caches[0], *map(torch.tensor, ([4], [[1]], [1])))
    torch.testing.assert_close(out[0], 2 * value[0].repeat_interleave(2, 0))


def numbered(num_layers: int = 2, **options) -> PagedKVCache:
    """Every element of block b is b in every layer's keys and 10 * b in its values."""
    cache = PagedKVCache(6, 2, [SPEC] * num_layers, **options)
    for key_cache, value_cache in zip(cache.key_caches, cache.value_caches, strict=True):
        for block in range(6):
            key_cache[block], value_cache[block] = float(block), 10.0 * block
    return cache


def blocks(tensor: torch.Tensor) -> list[float]:
    assert bool((tensor == tensor[:, :1, :1, :1]).all())
    return tensor[:, 0, 0, 0].tolist()


def test_copies_reach_every_layer_and_read_sources_first():
    cache = numbered()
    cache.copy([(1, 2), (2, 3)])
    for key_cache, value_cache in zip(cache.key_caches, cache.value_caches, strict=True):
        assert blocks(key_cache) == [0, 1, 1, 2, 4, 5]
        assert blocks(value_cache) == [0, 10, 10, 20, 40, 50]


def test_moves_are_applied_out_copy_in():
    """Block 1 goes to the host, is overwritten by a copy, and comes back elsewhere."""
    cache = numbered(num_host_blocks=2)
    cache.apply(swaps=([(1, 0)], [(0, 5)]), copies=[(2, 1)])
    assert blocks(cache.key_caches[1]) == [0, 2, 2, 3, 4, 1]
    assert blocks(cache.value_caches[1]) == [0, 20, 20, 30, 40, 10]


def test_layers_of_groups_share_one_pair_of_tensors():
    cache = numbered(num_layers=4, groups=[[0, 1], [2, 3]])
    assert cache.key_caches[0] is cache.key_caches[2] is not cache.key_caches[1]
    assert cache.value_caches[1] is cache.value_caches[3]
    assert cache.nbytes == 2 * 6 * 2 * SPEC.bytes_per_token()
    cache.copy([(1, 2), (2, 3)])  # each shared tensor once
    assert blocks(cache.key_caches[0]) == [0, 1, 1, 2, 4, 5]
