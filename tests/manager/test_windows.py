"""Sliding windows, chunked attention, and groups of them over one pool."""

from __future__ import annotations

import random

import pytest

from pagedkv.manager import GroupSpec, KVCacheManager
from pagedkv.manager.groups import Group
from tests.manager.actions import cache, compute, run

GEMMA = [GroupSpec("sliding", 8), GroupSpec("sliding", 8), GroupSpec()]


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_arithmetic_against_its_definition(kind, window, size):
    group = Group(GroupSpec(kind, window), size)

    def sees(query: int, key: int) -> bool:
        near = query - key < window if kind == "sliding" else query // window == key // window
        return key <= query and near

    for computed in range(40):
        seen = {key for query in range(computed, 60) for key in range(computed) if sees(query, key)}
        assert group.first_visible(computed) == min(seen, default=computed)
        kept = {key // size for key in seen} | {computed // size}
        assert group.num_released(computed) == min(kept)
        assert group.next_release(group.num_released(computed)) > computed
    for released in range(10):
        at = group.next_release(released)
        assert group.num_released(at) > released >= group.num_released(at - 1)


@pytest.mark.parametrize("size", [2, 3])
def test_chunked_attention_gives_back_whole_chunks(size):
    manager = KVCacheManager(40, size, groups=[GroupSpec("chunked", 6)])
    manager.add("a", range(20))
    for computed in range(20):
        manager.allocate_slots("a", 1)
        assert manager.block_ids("a")[0].count(0) == computed // 6 * 6 // size
        manager.commit("a", 1)
        manager.check_integrity()


def test_hybrid_hits_are_what_every_group_can_serve():
    manager = KVCacheManager(60, 4, groups=GEMMA)
    first = compute(manager, "a", range(24)).block_ids
    manager.free("a")
    assert manager.match_prefix(range(25)) == 24
    granted = compute(manager, "b", range(25))
    assert [table[:6] for table in granted.block_ids] == [
        [0, 0, 0, 0, *first[0][4:]],
        [0, 0, 0, 0, *first[1][4:]],
        first[2],
    ]
    manager.free("b")
    # a windowed group lacks the last block of the prefix: the next shorter one that all can serve
    manager.pool.evict([first[1][5]])
    assert manager.match_prefix(range(25)) == 20
    manager.pool.evict([first[0][3]])
    assert manager.match_prefix(range(25)) == 12
    # the full group ends at 8, where the window needs blocks 0 and 1
    manager.pool.evict([first[2][2]])
    assert manager.match_prefix(range(25)) == 8
    manager.pool.evict([first[0][0]])
    assert manager.match_prefix(range(25)) == 0


def test_eviction_in_one_group_leaves_the_others():
    manager = KVCacheManager(60, 4, groups=GEMMA)
    blocks = compute(manager, "a", range(8)).block_ids
    manager.pool.evict([blocks[0][0]])
    assert [manager.pool.is_published(table[0]) for table in blocks] == [False, True, True]
    assert manager.match_prefix(range(9)) == 0
    assert manager.pool.num_published == 5


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (4, 6), (3, 2, 4)])
def test_block_sizes_and_the_granularity_of_hits(sizes):
    groups = [GroupSpec(block_size=size) for size in sizes]
    manager = KVCacheManager(200, 16, groups=groups)
    cache(manager, range(40))
    assert manager.match_prefix(range(40)) == 39 // manager.state.step * manager.state.step
    granted = compute(manager, "a", range(40))
    assert [len(table) for table in granted.block_ids] == [-(-40 // size) for size in sizes]


def test_hits_of_random_caches_against_brute_force():
    """Evicts at random; the longest prefix that every group can serve is found by trying all of them."""
    rng = random.Random(1)
    groups = [GroupSpec(), GroupSpec("sliding", 5, block_size=2), GroupSpec("chunked", 6)]
    for _ in range(60):
        manager = KVCacheManager(100, 4, groups=groups)
        manager.add("a", range(24))
        tables: list[list[int]] = [[], [], []]
        for _ in range(12):
            for table, fresh in zip(tables, run(manager, "a", 2).new_block_ids, strict=True):
                table.extend(fresh)
        manager.free("a")
        gone = {block for table in tables for block in table if rng.random() < 0.2}
        manager.pool.evict(sorted(gone))

        def served(length: int, tables=tables, gone=gone, manager=manager) -> bool:
            for group, table in zip(manager.state.groups, tables, strict=True):
                last = length // group.block_size
                first = min(group.first_visible(length) // group.block_size, last - 1)
                if any(block in gone for block in table[first:last]):
                    return False
            return True

        expected = max((length for length in range(4, 25, 4) if served(length)), default=0)
        assert manager.match_prefix(range(25)) == expected
        assert compute(manager, "b", range(25)).num_cached_tokens == expected
