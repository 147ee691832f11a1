"""stats(), explain() and events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedkv.manager import GroupSpec, KVCacheManager
from tests.manager.actions import cache, compute, run


def test_stats_of_shared_and_partial_blocks():
    manager = KVCacheManager(21, 4, num_host_blocks=5)
    compute(manager, "a", range(10))
    stats = manager.stats(bytes_per_block=100)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_free_blocks) == (20, 3, 17)
    assert (stats.num_cached_blocks, stats.num_sequences, stats.num_running) == (2, 1, 1)
    assert (stats.num_tokens, stats.wasted_slots, stats.wasted_bytes) == (10, 2, 50)
    assert stats.wasted_percent == pytest.approx(100 * 2 / 12)
    manager.fork("a", "b")
    assert manager.stats().num_tokens == 10  # the same blocks
    manager.append("b", [1])
    manager.allocate_slots("b")
    stats = manager.stats()
    # the copy holds two tokens of four
    assert (stats.num_used_blocks, stats.num_tokens, stats.wasted_slots, stats.num_copies) == (4, 12, 4, 1)
    manager.take_copies()
    manager.preempt("b", "swap")
    stats = manager.stats()
    assert (stats.num_preemptions, stats.num_swaps, stats.num_host_blocks, stats.num_used_host_blocks) == (1, 1, 5, 3)
    assert (stats.num_sequences, stats.num_running) == (2, 1)
    assert manager.stats().wasted_bytes is None
    stats = KVCacheManager(5, 4).stats(100)
    assert (stats.num_used_blocks, stats.wasted_slots, stats.wasted_percent, stats.wasted_bytes) == (0, 0, 0.0, 0)
    assert stats.hit_rate == 0.0


def test_stats_of_a_block_that_one_owner_has_filled():
    manager = KVCacheManager(21, 4, enable_prefix_caching=False)
    manager.add("a", range(8))
    manager.allocate_slots("a")
    manager.commit("a", 6)
    manager.fork("a", "b")
    manager.commit("a", 2)  # into slots granted before the fork
    assert manager.stats().wasted_slots == 0


def test_stats_of_groups_count_released_blocks_as_free():
    manager = KVCacheManager(40, 2, groups=[GroupSpec(), GroupSpec("sliding", 4)])
    compute(manager, "a", range(12))
    manager.append("a", [1])
    run(manager, "a")
    stats = manager.stats()
    # 7 blocks of the full group, of the window those of positions 8..12
    assert (stats.num_used_blocks, stats.num_tokens, stats.wasted_slots) == (7 + 3, 13 + 5, 1 + 1)


def test_hit_rate_counts_admissions():
    manager = KVCacheManager(40, 4)
    compute(manager, "a", range(20))
    compute(manager, "b", range(20))
    assert manager.stats().hit_rate == pytest.approx(16 / 40)
    for number in range(1000):
        manager.add(number, [number + 100])
        manager.allocate_slots(number)
        manager.free(number)
    assert manager.stats().hit_rate == 0.0  # the last thousand hit nothing


@pytest.mark.parametrize(("limit", "most"), [(2048, 1.0), (256, 7.0), (64, 22.0)])
def test_waste_of_a_ragged_load(limit, most):
    """Half a block per sequence: 7.5 of 1,024 tokens on average for lengths up to 2,048."""
    rng = random.Random(0)
    manager = KVCacheManager(1 + 256 * limit // 16, 16)
    for name in range(256):
        manager.add(name, rng.randint(1, limit))
        manager.allocate_slots(name)
        manager.commit(name, manager.num_tokens(name))
    stats = manager.stats()
    assert 0.3 * most < stats.wasted_percent < most
    assert stats.num_tokens == sum(manager.num_tokens(name) for name in range(256))


def explained(manager: KVCacheManager, token_ids, **options) -> tuple[str, int | None, int]:
    """Of a sequence that waits, and again once it runs."""
    manager.add("asked", token_ids, **options)
    waiting = manager.explain("asked")
    assert manager.allocate_slots("asked") is not None
    assert manager.explain("asked") == waiting
    manager.free("asked")
    return waiting.reason, waiting.block, waiting.num_cached_tokens


LORA: dict[str, Any] = {"cache_salt": "s", "extra_keys": [("lora", "x")]}


@pytest.mark.parametrize(
    ("token_ids", "options", "expected"),
    [
        (range(13), LORA, ("hit", None, 12)),
        (range(12), LORA, ("hit", None, 8)),
        (range(3), LORA, ("short", None, 0)),
        (range(4), LORA, ("short", None, 0)),
        (12, LORA, ("unknown_tokens", None, 0)),
        (range(13), {**LORA, "cache_salt": "t"}, ("salt_differs", 0, 0)),
        (range(13), {"cache_salt": "s"}, ("keys_differ", 0, 0)),
        ([0, 1, 2, 3, 4, 50, 6, 7, 8], LORA, ("tokens_differ", 1, 4)),
        ([50, 60, 70, 80, 90], LORA, ("never_committed", 0, 0)),
        (range(20), LORA, ("never_committed", 3, 12)),
        (range(100, 113), {"extra_keys": [("image", "dog", 5, 8)]}, ("keys_differ", 1, 4)),
    ],
)
def test_explain(token_ids, options, expected):
    manager = KVCacheManager(40, 4)
    cache(manager, range(12), **LORA)
    cache(manager, range(100, 112), extra_keys=[("image", "cat", 5, 8)])
    assert explained(manager, token_ids, **options) == expected


def test_explain_names_the_first_token_that_differs():
    manager = KVCacheManager(40, 4)
    cache(manager, range(12))
    manager.add("a", [0, 1, 2, 3, 4, 5, 60, 70, 8])
    assert manager.explain("a").detail == "token 6 is 60, the nearest cached block has 6"


def test_explain_what_is_not_there():
    manager = KVCacheManager(40, 4)
    manager.add("first", range(9))
    manager.allocate_slots("first")
    compute(manager, "second", range(9))
    manager.commit("first", 9)
    found = manager.explain("second")  # as it was when it was looked up
    assert (found.reason, found.block) == ("never_committed", 0)
    assert explained(KVCacheManager(40, 4, enable_prefix_caching=False), range(9)) == ("disabled", None, 0)
    manager = KVCacheManager(5, 4)
    cache(manager, range(16))
    compute(manager, "other", [50] * 4)
    manager.add("a", range(17))
    assert (manager.explain("a").reason, manager.explain("a").block) == ("evicted", 3)
    assert manager.stats().num_evictions == 1
    manager = KVCacheManager(40, 2, sliding_window=4)
    manager.add("a", range(8))
    blocks = [run(manager, "a", 2).new_block_ids[0] for _ in range(4)]
    manager.free("a")
    manager.pool.evict(blocks[2:3])
    assert explained(manager, range(9)) == ("evicted", 2, 4)


def test_events_in_order():
    manager = KVCacheManager(4, 2, record_events=True)
    compute(manager, "a", [1, 2, 3, 4, 5])
    stored = manager.take_events()
    assert [event[0] for event in stored] == ["stored", "stored"]
    assert stored[1][2] == stored[0][1]
    assert [event[3] for event in stored] == [(1, 2), (3, 4)]
    assert manager.take_events() == []
    manager.free("a")
    compute(manager, "b", [7, 8, 9, 10])
    tail, new, last = manager.take_events()
    assert tail == ("removed", stored[1][1])
    assert (new[0], new[2], last[2]) == ("stored", None, new[1])
    manager.free("b")
    manager.reset_prefix_cache()
    assert manager.take_events() == [("cleared",)]
    assert KVCacheManager(4, 2).take_events() == []


def test_events_of_groups_tell_them_apart():
    manager = KVCacheManager(40, 2, groups=[GroupSpec(block_size=2), GroupSpec(block_size=4)], record_events=True)
    compute(manager, "a", range(8))
    events = manager.take_events()
    assert [event[3] for event in events] == [(0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert len({event[1] for event in events}) == 6
    assert [event[2] for event in events] == [None, *(event[1] for event in events[:3]), None, events[4][1]]


def test_reprs_say_what_is_used():
    manager = KVCacheManager(21, 4)
    compute(manager, "a", range(10))
    manager.add("b", [1])
    assert repr(manager) == "KVCacheManager(3 of 20 blocks of 4 tokens used, 2 sequences, 1 running)"
    assert repr(manager.pool) == "BlockPool(3 of 20 blocks used, 2 published)"
    assert repr(KVCacheManager(4, 2, groups=[GroupSpec(), GroupSpec("sliding", 8)])).endswith("0 running, 2 groups)")
