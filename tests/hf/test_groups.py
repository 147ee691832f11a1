"""Layers of several windows share one pool, and waste at most a tenth of what their visible keys need."""

import pytest
import torch
from models import generate, ragged, tiny, with_cache

import pagedkv
from pagedkv import PagedCache, group_layers

SLIDING, FULL = "sliding_attention", "full_attention"
# number of layers, sliding layers for each full one, window
PATTERNS = {
    "gemma-3-270m": (18, 5, 512),
    "gemma-3-1b": (26, 5, 512),
    "gemma-3-4b": (34, 5, 1024),
    "gemma-3-12b": (48, 5, 1024),
    "gemma-3-27b": (62, 5, 1024),
    "gpt-oss-20b": (24, 1, 128),
    "gpt-oss-120b": (36, 1, 128),
    "3 to 1": (48, 3, 4096),
}


@pytest.mark.parametrize(("num_layers", "ratio", "window"), PATTERNS.values(), ids=PATTERNS)
def test_a_long_sequence_takes_at_most_a_tenth_more_than_its_visible_keys(num_layers, ratio, window):
    kinds = [FULL if layer % (ratio + 1) == ratio else SLIDING for layer in range(num_layers)]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_key_value_heads": 1}
    model = tiny("gemma3_text", num_hidden_layers=num_layers, layer_types=kinds, sliding_window=window, **sizes)
    cache = PagedCache(model.config, num_blocks=131_072 // 16 * num_layers)
    model.set_attn_implementation("pagedkv")
    with torch.no_grad():
        model(torch.tensor([[3, 4]]), **with_cache(model, cache))
    cache.reset()
    pool, token_bytes = cache.pool, 2 * 8 * 4  # of a layer

    def compute(num_tokens):
        pool.manager.allocate_slots("long", num_tokens)
        pool.manager.commit("long", num_tokens)
        return num_tokens

    rows = max(layer.row for layer in cache.layers) + 1
    assert pool.block_bytes == rows * 16 * token_bytes
    pool.manager.add("long", 131_073)
    length = 0
    for goal in (8_192, 32_768, 131_072):
        while length < goal:
            length += compute(min(2048, goal - length))
        length += compute(1)  # what a window has passed goes when slots are asked for
        visible = sum(length if kind == FULL else min(length, window) for kind in kinds)
        assert pool.manager.stats().num_used_blocks * pool.block_bytes <= 1.1 * visible * token_bytes


def test_a_model_of_many_groups_is_accepted_and_gives_its_own_tokens():
    """13 groups: the probes' few blocks are for each of them."""
    kinds = [FULL if layer == 6 else SLIDING for layer in range(13)]
    model, inputs = tiny("gemma3_text", num_hidden_layers=13, layer_types=kinds), ragged([11, 3, 7])
    expected = generate(model, inputs)
    with pagedkv.patched(model, num_blocks=512, block_size=4):
        assert len(pagedkv.pool(model).windows) == 13
        assert torch.equal(generate(model, inputs), expected)
    with pagedkv.Engine(model, num_blocks=512, block_size=4, max_num_seqs=4) as engine:
        prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
        results = engine.generate(prompts, max_new_tokens=10)
    assert [result.token_ids for result in results] == expected[:, 11:].tolist()


def test_every_layer_is_in_one_group_of_its_window():
    windows = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group) == list(range(62))
    assert all(len({windows[layer] for layer in group}) == 1 for group in groups)
    assert [len(group) for group in groups] == [5] * 10 + [2] + [5, 5]
    assert group_layers([None] * 32) == [list(range(32))]
    assert group_layers([]) == []


def test_groups_of_the_manager_are_those_of_a_cache_of_ones_own():
    """The same call serves `KVCacheManager` and `PagedKVCache`."""
    windows = [8, 8, 8, 8, None, None]
    groups = group_layers(windows)
    specs = [pagedkv.GroupSpec("sliding", 8), pagedkv.GroupSpec("sliding", 8), pagedkv.GroupSpec()]
    manager = pagedkv.KVCacheManager(64, 4, groups=specs)
    layer = pagedkv.LayerSpec(num_kv_heads=1, head_size=4, dtype=torch.float32)
    cache = pagedkv.PagedKVCache(64, 4, [layer] * 6, groups=groups)
    assert cache.block_bytes == 2 * 2 * 4 * 4 * 4  # two layers, keys and values
    manager.add("long", 100)
    for _ in range(25):
        manager.allocate_slots("long", 4)
        manager.commit("long", 4)
    assert manager.stats().num_used_blocks == 25 + 2 * 3


def test_a_cache_that_cannot_know_what_a_block_takes_asks_for_a_number():
    config = tiny("jetmoe", num_hidden_layers=1, kv_channels=16, num_local_experts=2, num_experts_per_tok=1).config
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"^num_blocks: .* what a block of jetmoe takes"):
        PagedCache(config)
    PagedCache(config, num_blocks=8)
