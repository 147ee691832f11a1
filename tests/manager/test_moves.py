"""Copies, sharing, swaps and preemption, where order matters."""

from __future__ import annotations

import pytest

from pagedkv.errors import CommitError, PendingCopyError
from pagedkv.manager import KVCacheManager
from tests.manager.actions import cache, compute, run, snapshot


def test_source_stays_alive_until_the_copies_are_taken():
    manager = KVCacheManager(4, 4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.fork("a", "b")
    manager.append("b", [1])
    manager.allocate_slots("b")
    manager.free("a")  # block 1 is pinned now: neither in a table nor free
    manager.check_integrity()
    assert manager.num_free_blocks == 1
    manager.add("c", range(8))
    assert manager.allocate_slots("c") is None
    assert manager.take_copies() == [(1, 2)]
    assert manager.num_free_blocks == 2
    assert manager.allocate_slots("c").new_block_ids == [1, 3]


def test_hit_on_a_pinned_block():
    manager = KVCacheManager(10, 4, partial_hits=True)
    cache(manager, range(8))
    manager.add("a", range(6))
    manager.allocate_slots("a")  # copies block 2
    manager.add("b", range(9))
    assert manager.allocate_slots("b").block_ids[:2] == [1, 2]
    manager.check_integrity()
    manager.free("b")
    manager.free("a")
    manager.check_integrity()
    assert manager.num_free_blocks == 9


def test_copy_that_two_owners_wait_for():
    manager = KVCacheManager(10, 4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.fork("a", "b")
    manager.append("b", [1])
    manager.allocate_slots("b")
    manager.fork("b", "c")
    manager.free("b")
    manager.check_integrity()
    assert manager.take_copies() == [(1, 2)]


def test_cutting_the_destination_drops_its_copy():
    manager = KVCacheManager(10, 4, enable_prefix_caching=False)
    compute(manager, "a", range(6))
    manager.fork("a", "b")
    manager.append("b", [1])
    manager.allocate_slots("b")
    manager.truncate("b", 4)
    manager.check_integrity()
    assert manager.take_copies() == []
    assert manager.pool.pins == {}


def test_sole_owner_writes_into_its_own_published_block_in_place():
    manager = KVCacheManager(10, 4, record_events=True)
    compute(manager, "a", range(8))
    manager.truncate("a", 6)
    assert manager.match_prefix(range(9)) == 8  # still cached while nobody writes
    manager.append("a", [60, 70])
    manager.take_events()
    granted = manager.allocate_slots("a")
    assert (granted.new_block_ids, granted.block_ids) == ([], [1, 2])
    assert [event[0] for event in manager.take_events()] == ["removed"]
    assert manager.take_copies() == []
    assert manager.match_prefix(range(9)) == 4
    manager.commit("a", 2)
    manager.check_integrity()
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 60, 70, 8]) == 8


def test_hit_that_is_cut_into_is_copied():
    manager = KVCacheManager(10, 4)
    cache(manager, range(8))
    compute(manager, "a", range(9))
    manager.truncate("a", 6)
    manager.append("a", [60])
    granted = manager.allocate_slots("a")
    assert manager.take_copies() == [(2, granted.block_ids[1])]
    manager.commit("a", 1)
    manager.check_integrity()
    assert manager.match_prefix(range(9)) == 8


def test_shared_published_block_is_copied_then_written_in_place():
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(8))
    manager.fork("a", "b")
    for name in "ab":
        manager.truncate(name, 7)
        manager.append(name, [ord(name)])
    assert run(manager, "a").new_block_ids == [3]
    assert run(manager, "b").new_block_ids == []
    assert manager.block_ids("b") == [1, 2]
    assert manager.match_prefix([*range(7), ord("a"), 1]) == 8
    assert manager.match_prefix([*range(7), ord("b"), 1]) == 8


def test_fork_takes_committed_tokens_only():
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(5))
    manager.append("a", [5, 6])
    manager.allocate_slots("a", num_lookahead_tokens=6)
    manager.fork("a", "b")
    assert manager.num_tokens("b") == 5
    assert manager.block_ids("b") == manager.block_ids("a")[:2]
    with pytest.raises(CommitError):
        manager.commit("b", 1)
    manager.check_integrity()


def test_fork_before_anything_is_computed():
    manager = KVCacheManager(10, 4)
    cache(manager, range(8))
    manager.add("a", range(9))
    manager.fork("a", "b")
    assert (manager.num_tokens("b"), manager.block_ids("b")) == (0, [])
    manager.append("b", range(9))
    assert run(manager, "b").num_cached_tokens == 8


def test_reorder_is_a_permutation_of_the_old_state():
    manager = KVCacheManager(40, 2)
    names = ["a", "b", "c", "d"]
    for number, name in enumerate(names):
        compute(manager, name, [number] * (3 + number))
    old = {name: manager.block_ids(name) for name in names}
    manager.reorder(names, [3, 2, 1, 0])
    manager.check_integrity()
    assert [manager.block_ids(name) for name in names] == [old[name] for name in reversed(names)]
    manager.reorder(names, [0, 0, 0, 0])
    manager.check_integrity()
    assert len({tuple(manager.block_ids(name)) for name in names}) == 1
    assert manager.pool.refs[old["d"][0]] == 4


def test_swap_out_and_in():
    manager = KVCacheManager(10, 4, num_host_blocks=3, enable_prefix_caching=False)
    compute(manager, "a", range(10))
    assert manager.preempt("a", "swap") == "swap"
    manager.check_integrity()
    assert manager.num_free_blocks == 9
    assert manager.num_computed_tokens("a") == 10
    assert manager.take_swaps() == ([(1, 0), (2, 1), (3, 2)], [])
    assert manager.stats().num_used_host_blocks == 3
    manager.append("a", [10])
    granted = manager.allocate_slots("a")
    assert granted.num_cached_tokens == 10
    assert granted.slots == [granted.block_ids[2] * 4 + 2]
    with pytest.raises(PendingCopyError):
        manager.commit("a", 1)
    outs, ins = manager.take_swaps()
    assert outs == []
    assert ins == list(zip([0, 1, 2], granted.block_ids, strict=True))
    assert manager.stats().num_used_host_blocks == 0
    manager.commit("a", 1)
    manager.check_integrity()


def test_swap_that_does_not_fit_falls_back():
    manager = KVCacheManager(10, 4, num_host_blocks=2)
    compute(manager, "a", range(10))
    assert manager.preempt("a", "swap") == "recompute"
    assert manager.num_computed_tokens("a") == 0
    assert manager.take_swaps() == ([], [])
    assert manager.allocate_slots("a").num_cached_tokens == 8


def test_swapped_blocks_that_are_still_cached_are_not_moved():
    manager = KVCacheManager(10, 4, num_host_blocks=4)
    compute(manager, "a", range(10))
    manager.preempt("a", "swap")
    granted = manager.allocate_slots("a")
    assert granted.block_ids[:2] == [1, 2]
    outs, ins = manager.take_swaps()
    # only the block that was not full went out, and comes back
    assert outs == [(3, 2)]
    assert ins == [(2, granted.block_ids[2])]
    manager.check_integrity()


def test_swap_out_of_a_pending_copy_reads_its_source():
    manager = KVCacheManager(10, 4, num_host_blocks=4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.fork("a", "b")
    manager.append("b", [1])
    manager.allocate_slots("b")  # 1 -> 2
    assert manager.preempt("b", "swap") == "swap"
    manager.check_integrity()
    assert manager.take_swaps() == ([(1, 0)], [])
    assert manager.take_copies() == []


def test_copy_from_a_pending_swap_in_becomes_a_swap_in():
    manager = KVCacheManager(10, 4, num_host_blocks=4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.preempt("a", "swap")
    manager.take_swaps()
    manager.allocate_slots("a")
    manager.fork("a", "b")
    manager.append("b", [1])
    manager.allocate_slots("b")
    manager.check_integrity()
    assert manager.take_copies() == []
    assert manager.take_swaps() == ([], [(0, manager.block_ids("a")[0]), (0, manager.block_ids("b")[0])])
    assert manager.stats().num_used_host_blocks == 0


def test_swap_out_of_a_pending_swap_in_keeps_the_host_block():
    manager = KVCacheManager(10, 4, num_host_blocks=1, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.preempt("a", "swap")
    manager.take_swaps()
    manager.allocate_slots("a")
    assert manager.preempt("a", "swap") == "swap"
    manager.check_integrity()
    assert manager.take_swaps() == ([], [])
    manager.allocate_slots("a")
    assert manager.take_swaps() == ([], [(0, manager.block_ids("a")[0])])


def test_swapped_sequences_are_forked_cut_and_freed():
    manager = KVCacheManager(20, 4, num_host_blocks=4, enable_prefix_caching=False)
    compute(manager, "a", range(10))
    manager.preempt("a", "swap")
    manager.fork("a", "b")
    manager.check_integrity()
    manager.truncate("a", 3)
    manager.check_integrity()
    assert manager.stats().num_used_host_blocks == 3
    manager.free("b")
    assert manager.stats().num_used_host_blocks == 1
    assert manager.preempt("a", "swap") == "swap"
    assert manager.preempt("a") == "recompute"
    assert manager.stats().num_used_host_blocks == 0
    manager.check_integrity()
    assert manager.take_swaps() == ([], [])  # nobody wants what was to go out


def test_swapped_in_blocks_are_published_by_the_next_commit():
    manager = KVCacheManager(10, 4, num_host_blocks=4)
    blocks = compute(manager, "a", range(9)).block_ids
    manager.preempt("a", "swap")
    manager.take_swaps()
    manager.pool.evict(blocks[:2])
    manager.append("a", [9])
    manager.allocate_slots("a")
    assert manager.match_prefix(range(10)) == 0
    manager.take_swaps()
    manager.commit("a", 1)
    manager.check_integrity()
    assert manager.match_prefix(range(10)) == 8


def test_preempting_what_holds_nothing():
    manager = KVCacheManager(10, 4, num_host_blocks=4)
    manager.add("a", range(5))
    assert manager.preempt("a", "swap") == "recompute"
    assert run(manager, "a").slots == [4, 5, 6, 7, 8]


def test_watermark():
    manager = KVCacheManager(21, 4, watermark=0.11, enable_prefix_caching=False)
    assert manager.state.watermark_blocks == 3  # ceil(0.11 * 20)
    assert KVCacheManager(101, 4, watermark=0.07).state.watermark_blocks == 7  # 0.07 * 100 is 7.000000000000001
    compute(manager, "a", range(64))
    manager.add("b", range(8))
    before = snapshot(manager)
    assert manager.allocate_slots("b") is None  # 4 free, 2 wanted, 3 kept
    assert snapshot(manager) == before
    assert manager.allocate_slots("b", 4) is not None
    # a sequence that runs may use what is kept
    assert manager.allocate_slots("b") is not None
    manager.free("a")
    manager.free("b")
    # alone in the pool
    assert compute(manager, "c", range(80)).block_ids[-1] == 20


def test_watermark_counts_blocks_in_use_not_hits():
    manager = KVCacheManager(11, 4, watermark=0.2)
    cache(manager, range(32))
    compute(manager, "a", [100])
    manager.add("b", range(33))
    # 8 of its 9 blocks are hits, but free ones: 9 - 9 < 2
    assert manager.allocate_slots("b") is None
    manager.free("a")
    assert manager.allocate_slots("b").num_cached_tokens == 32


def test_allocation_never_hands_out_its_own_hits():
    manager = KVCacheManager(5, 4)
    cache(manager, range(8))
    compute(manager, "x", [50])
    manager.add("a", range(13))
    # 3 free of which 2 are the hits: two more blocks are not there
    assert manager.allocate_slots("a") is None
    assert manager.match_prefix(range(13)) == 8
    assert manager.allocate_slots("a", 4).block_ids[:2] == [1, 2]


def test_external_tokens_after_a_hit():
    manager = KVCacheManager(20, 4)
    cache(manager, range(8))
    manager.add("a", range(20))
    granted = manager.allocate_slots("a", 2, num_external_tokens=6)
    assert granted.num_cached_tokens == 8
    assert len(granted.block_ids) == 4
    assert granted.slots == [granted.block_ids[3] * 4 + 2, granted.block_ids[3] * 4 + 3]
    manager.commit("a", 6)
    assert manager.num_computed_tokens("a") == 14
    assert manager.match_prefix(range(20)) == 12
    manager.commit("a", 2)
    assert manager.match_prefix(range(20)) == 16


def test_requests_are_cut_and_repeated_calls_take_nothing():
    manager = KVCacheManager(20, 4)
    manager.add("a", range(6))
    granted = manager.allocate_slots("a", 100)
    assert len(granted.slots) == 6
    assert manager.allocate_slots("a", 0).slots == []
    free = manager.num_free_blocks
    for _ in range(3):
        again = manager.allocate_slots("a", 100)
        assert (again.slots, again.block_ids, again.new_block_ids) == (granted.slots, granted.block_ids, [])
        assert again.num_cached_tokens == 0
    assert manager.num_free_blocks == free


def test_append_step_equals_single_calls():
    """Forks that share a partial block, a block boundary and a plain sequence, in one call and one by one."""
    managers = [KVCacheManager(30, 4) for _ in range(2)]
    for manager in managers:
        compute(manager, "a", range(6))
        manager.fork("a", "b")
        compute(manager, "c", range(20, 28))
        compute(manager, "d", range(40, 43))
    names, tokens = list("abcd"), [1, 2, 3, 4]
    step = managers[0].append_step(names, tokens)
    for name, token in zip(names, tokens, strict=True):
        managers[1].append(name, [token])
        managers[1].allocate_slots(name)
    (copy,), (other,) = managers[0].take_copies(), managers[1].take_copies()
    assert copy[0] == other[0] == 2
    a, c = managers[0].block_ids("a"), managers[0].block_ids("c")
    assert a[1] == copy[1]
    assert step.entries == [([2, 0], [2, 1], [c[2], a[1]])]
    managers[0].commit_step(names)
    for name in names:
        managers[1].commit(name, 1)
        assert len(managers[0].block_ids(name)) == len(managers[1].block_ids(name))
        assert managers[0].num_computed_tokens(name) == managers[1].num_computed_tokens(name)
    for manager in managers:
        manager.check_integrity()
    assert managers[0].pool.num_published == managers[1].pool.num_published


def test_append_step_without_room_changes_nothing():
    manager = KVCacheManager(4, 4)
    for name in "abc":
        compute(manager, name, [ord(name)] * 4)
    before = snapshot(manager)
    assert manager.append_step("abc", [1, 2, 3]) is None
    assert snapshot(manager) == before
