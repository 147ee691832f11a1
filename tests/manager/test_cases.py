"""Small inputs with their right answers, each from a fault that users of other systems have met."""

from __future__ import annotations

import copy
import hashlib
import math
import pickle

import numpy as np
import pytest
import torch

from pagedkv.block_pool import BlockPool
from pagedkv.errors import BlockReferenceError, InvalidArgumentError, PendingCopyError, UnknownSequenceError
from pagedkv.manager import KVCacheManager
from tests.manager.actions import cache, compute, run, snapshot


def test_block_named_twice_in_one_free():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    with pytest.raises(BlockReferenceError, match="freed 2 times but referenced 1 times"):
        pool.free_blocks([blocks[0], blocks[1], blocks[0]])
    assert pool.num_free == 0
    pool.free_blocks([3, 2, 1])
    with pytest.raises(BlockReferenceError):
        pool.free_blocks([2])
    assert pool.num_free == 3
    assert len(set(pool.get_new_blocks(3))) == 3
    pool.check_integrity()


def test_sequence_freed_twice():
    manager = KVCacheManager(4, 4)
    compute(manager, "a", range(12))
    manager.free("a")
    before = snapshot(manager)
    with pytest.raises(UnknownSequenceError, match="'a'"):
        manager.free("a")
    assert snapshot(manager) == before
    assert manager.num_free_blocks == 3


def test_fork_and_parent_both_freed():
    manager = KVCacheManager(4, 4)
    compute(manager, "a", range(10))
    manager.fork("a", "b")
    manager.free("a")
    assert manager.num_free_blocks == 0
    manager.free("b")
    assert manager.num_free_blocks == 3
    for name in ("a", "b"):
        with pytest.raises(UnknownSequenceError):
            manager.free(name)
    assert len(set(compute(manager, "c", range(100, 112)).block_ids)) == 3


def test_eviction_inside_a_chain():
    manager = KVCacheManager(4, 2)
    cache(manager, [1, 2, 3, 4, 5, 6])
    manager.add("other", 1)
    manager.allocate_slots("other")
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]) == 4


def test_eviction_of_the_head():
    manager = KVCacheManager(4, 2)
    head = compute(manager, "a", [1, 2, 3, 4, 5, 6]).block_ids[0]
    manager.pool.evict([head])
    manager.free("a")
    manager.check_integrity()
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]) == 0


def test_resume_after_preemption():
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(10))
    manager.preempt("a")
    granted = manager.allocate_slots("a")
    assert granted.num_cached_tokens == 8
    assert len(granted.block_ids) == 3
    assert granted.slots == [granted.block_ids[2] * 4, granted.block_ids[2] * 4 + 1]


@pytest.mark.parametrize(("partial_hits", "hit"), [(False, 4), (True, 7)])
def test_whole_prompt_cached(partial_hits, hit):
    manager = KVCacheManager(10, 4, partial_hits=partial_hits)
    cache(manager, range(8))
    assert manager.match_prefix(range(8)) == hit
    assert manager.match_prefix(range(9)) == 8
    manager.add("again", range(8))
    granted = manager.allocate_slots("again")
    assert granted.num_cached_tokens == hit
    copies = manager.take_copies()
    assert copies == ([(2, granted.block_ids[1])] if partial_hits else [])
    assert granted.block_ids[1] != 2


def test_collision():
    manager = KVCacheManager(20, 4, hash_fn=lambda data: b"constant")
    cache(manager, [1, 2, 3, 4, 9])
    assert compute(manager, "other", [5, 6, 7, 8, 9]).num_cached_tokens == 0
    assert compute(manager, "repeat", [1, 2, 3, 4, 9]).num_cached_tokens == 4


def test_collision_of_equal_tokens():
    manager = KVCacheManager(20, 4, hash_fn=lambda data: b"constant")
    cache(manager, [1, 2, 3, 4, 5, 6, 7, 8], extra_keys=[("lora", "a")], cache_salt="s")
    same = {"extra_keys": [("lora", "a")], "cache_salt": "s"}
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9], **same) == 8
    # the same tokens under another parent, another key, another salt
    cache(manager, [9, 9, 9, 9], **same)
    assert manager.match_prefix([9, 9, 9, 9, 5, 6, 7, 8, 9], **same) == 4
    assert manager.match_prefix([5, 6, 7, 8, 9], **same) == 0
    assert manager.match_prefix([1, 2, 3, 4, 5], extra_keys=[("lora", "b")], cache_salt="s") == 0
    assert manager.match_prefix([1, 2, 3, 4, 5], extra_keys=[("lora", "a")], cache_salt="t") == 0


def test_rejected_drafts():
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(6))
    for _ in range(100):
        granted = manager.allocate_slots("a", num_lookahead_tokens=4)
        assert granted.slots == []
        assert len(granted.lookahead_slots) == 4
        assert len(granted.block_ids) == 3
        manager.truncate("a", 6)
        manager.check_integrity()
        assert manager.match_prefix(range(10)) == 4
        assert manager.num_tokens("a") == 6
        assert len(manager.block_ids("a")) == 2
    manager.free("a")
    assert manager.num_free_blocks == 9


def test_accepted_drafts():
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(6))
    manager.append("a", [6])
    granted = manager.allocate_slots("a", 1, num_lookahead_tokens=3)
    assert granted.lookahead_slots == [8 + 3, 12, 13]
    # two of the three drafts are right
    manager.append("a", [7, 8])
    manager.commit("a", 3)
    manager.check_integrity()
    assert manager.match_prefix(range(20)) == 8
    manager.truncate("a", 9)
    assert manager.num_computed_tokens("a") == 9


def test_divergence():
    manager = KVCacheManager(20, 4)
    compute(manager, "a", range(6))
    manager.fork("a", "b")
    manager.fork("a", "c")
    for name, token in zip("abc", (10, 11, 12), strict=True):
        manager.append(name, [token])
        manager.allocate_slots(name)
    last = manager.block_ids("c")
    assert last[1] == 2  # in place
    assert sorted(manager.take_copies()) == [(2, 3), (2, 4)]
    for name in "abc":
        manager.commit(name, 1)
    manager.check_integrity()
    assert len({block for name in "abc" for block in manager.block_ids(name)}) == 4
    assert manager.pool.refs[last[0]] == 3


def test_divergence_at_a_block_boundary():
    manager = KVCacheManager(20, 4)
    compute(manager, "a", range(8))
    manager.fork("a", "b")
    manager.fork("a", "c")
    for name in "abc":
        manager.append(name, [ord(name)])
        manager.allocate_slots(name)
    assert manager.take_copies() == []
    assert len({block for name in "abc" for block in manager.block_ids(name)}) == 5


def test_reorder():
    manager = KVCacheManager(20, 4)
    compute(manager, 0, range(4))
    for beam in (1, 2):
        manager.fork(0, beam)
    for beam in range(3):
        manager.append(beam, [10 + beam])
        run(manager, beam)
    old = [manager.block_ids(beam) for beam in range(3)]
    free = manager.num_free_blocks
    manager.reorder([0, 1, 2], [2, 0, 0])
    manager.check_integrity()
    assert [manager.block_ids(beam) for beam in range(3)] == [old[2], old[0], old[0]]
    assert manager.num_free_blocks == free + 1
    assert manager.pool.refs[old[1][1]] == 0
    assert [list(manager.sequences[beam].tokens.part(4, 5)) for beam in range(3)] == [[12], [10], [10]]


def test_accounting():
    manager = KVCacheManager(11, 16)
    a = list(range(55))
    compute(manager, "a", a)
    assert len(manager.block_ids("a")) == 4
    assert manager.pool.num_published == 3
    granted = compute(manager, "b", [*a[:48], 100, 101, 102, 103, 104])
    assert granted.num_cached_tokens == 48
    assert len(granted.new_block_ids) == 1
    assert [manager.pool.refs[block] for block in granted.block_ids] == [2, 2, 2, 1]
    assert manager.num_free_blocks == 5
    manager.append("a", [7] * 4)
    assert run(manager, "a").new_block_ids == []
    manager.append("a", [8] * 19)
    assert len(run(manager, "a").new_block_ids) == 1
    published = [manager.pool.is_published(block) for block in manager.block_ids("a")]
    assert published == [True, True, True, True, False]


def test_no_cache():
    manager = KVCacheManager(5, 4, enable_prefix_caching=False)
    assert len(compute(manager, "a", range(10)).block_ids) == 3
    manager.free("a")
    granted = compute(manager, "b", range(16))
    assert (granted.num_cached_tokens, len(granted.block_ids)) == (0, 4)
    manager.append("b", [1, 2, 3, 4])
    before = snapshot(manager)
    assert manager.allocate_slots("b") is None
    assert snapshot(manager) == before


def test_salt():
    manager = KVCacheManager(20, 16)
    cache(manager, [5] * 59, cache_salt="tenant")
    assert manager.match_prefix([5] * 59, cache_salt="tenant") == 48
    assert manager.match_prefix([5] * 59, cache_salt="another") == 0
    assert manager.match_prefix([5] * 59) == 0


@pytest.mark.parametrize(
    ("cached", "hit"), [("T", 2), ("TTF", 4), ("TTFTFFTTFTTT", 24), ("TTFTFFTTFFF", 16), ("FFF", 0), ("FT", 0)]
)
def test_windowed_hits(cached, hit):
    manager = KVCacheManager(40, 2, sliding_window=4)
    tokens = list(range(2 * len(cached)))
    manager.add("a", tokens)
    # block by block, as the window gives the first ones back
    blocks = [run(manager, "a", 2).new_block_ids[0] for _ in cached]
    manager.free("a")
    manager.pool.evict([block for block, flag in zip(blocks, cached, strict=True) if flag == "F"])
    manager.check_integrity()
    assert manager.match_prefix([*tokens, 1000]) == hit
    granted = compute(manager, "b", [*tokens, 1000])
    needed = min(hit // 2, math.ceil(3 / 2))
    table = [0] * (hit // 2 - needed) + blocks[hit // 2 - needed : hit // 2]
    assert granted.block_ids[: hit // 2] == table


def test_blocks_released_by_a_window():
    manager = KVCacheManager(40, 2, sliding_window=4)
    manager.add("a", range(20))
    released = {}
    for computed in range(12):
        manager.allocate_slots("a", 1)
        released[computed] = manager.block_ids("a").count(0)
        manager.commit("a", 1)
        manager.check_integrity()
    assert [released[computed] for computed in (4, 5, 7, 11)] == [0, 1, 2, 4]


def test_partial_hits_never_spoil_the_cache():
    manager = KVCacheManager(10, 4, partial_hits=True)
    cache(manager, range(1, 9))
    assert manager.match_prefix(range(1, 7)) == 5
    manager.add("b", range(1, 7))
    granted = manager.allocate_slots("b")
    assert granted.num_cached_tokens == 5
    assert granted.block_ids[0] == 1
    assert manager.take_copies() == [(2, granted.block_ids[1])]
    assert granted.slots == [granted.block_ids[1] * 4 + 1]
    manager.commit("b", 1)
    manager.check_integrity()
    again = compute(manager, "c", range(1, 10))
    assert again.num_cached_tokens == 8
    assert again.block_ids[:2] == [1, 2]


def test_partial_hit_without_a_block_for_the_copy():
    manager = KVCacheManager(4, 4, partial_hits=True)
    cache(manager, range(1, 9))
    manager.add("last block", 1)
    manager.allocate_slots("last block")
    assert manager.num_free_blocks == 2
    manager.add("b", range(1, 7))
    granted = manager.allocate_slots("b")
    assert granted.num_cached_tokens == 4
    assert len(granted.slots) == 2
    assert manager.take_copies() == []
    manager.commit("b", 2)
    manager.check_integrity()


def test_chained_copies():
    manager = KVCacheManager(10, 4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    manager.fork("a", "b")
    manager.append("b", [10])
    manager.allocate_slots("b")  # 1 -> 2
    assert manager.block_ids("b") == [2]
    with pytest.raises(PendingCopyError, match="block 2"):
        manager.commit("b", 1)
    manager.fork("b", "c")
    manager.append("c", [11])
    manager.allocate_slots("c")
    assert manager.take_copies() == [(1, 2), (1, 3)]
    manager.check_integrity()
    assert manager.pool.pins == {}


def test_copy_dropped_with_its_owner():
    manager = KVCacheManager(10, 4, enable_prefix_caching=False)
    compute(manager, "a", range(2))
    for name in "bc":
        manager.fork("a", name)
        manager.append(name, [10])
        manager.allocate_slots(name)
    manager.free("c")
    manager.check_integrity()
    assert manager.take_copies() == [(1, 2)]


def test_chunk_after_a_hit():
    manager = KVCacheManager(40, 16)
    cache(manager, range(300))
    manager.add("a", range(300))
    granted = manager.allocate_slots("a", 256)
    assert granted.num_cached_tokens == 288
    assert len(granted.slots) == 12


def test_external_tokens():
    manager = KVCacheManager(10, 16)
    manager.add("a", range(40))
    granted = manager.allocate_slots("a", num_external_tokens=32)
    assert len(granted.block_ids) == 3
    assert granted.slots == list(range(48, 56))
    assert manager.match_prefix(range(40)) == 0
    manager.commit("a", 32)
    manager.check_integrity()
    assert manager.match_prefix(range(40)) == 32
    assert [manager.pool.is_published(block) for block in granted.block_ids] == [True, True, False]
    again = manager.allocate_slots("a")
    assert again.slots == granted.slots
    assert again.new_block_ids == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_copies_go_on_alone(duplicate):
    """Of 200,000 tokens too: 12,500 links, each the parent of the next."""
    manager = KVCacheManager(13_000, 16, record_events=True, num_host_blocks=4)
    compute(manager, "a", range(200_000))
    manager.fork("a", "b")
    compute(manager, "swapped", range(40))
    manager.preempt("swapped", "swap")
    other = duplicate(manager)
    assert snapshot(other) == snapshot(manager)
    assert other.sequences["a"].tip is other.sequences["b"].tip
    for side in (manager, other):
        side.append("b", range(20))
        run(side, "b")
    assert snapshot(other) == snapshot(manager)
    manager.free("a")
    manager.free("b")
    assert other.num_tokens("a") == 200_000
    other.preempt("a")
    assert run(other, "a").num_cached_tokens == 199_984
    other.free("a")
    other.check_integrity()
    manager.check_integrity()


def test_copies_that_can_not_be_are_refused_by_name():
    manager = KVCacheManager(10, 4, hash_fn=lambda data: data[:8])
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(manager)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(manager)


@pytest.mark.parametrize("scalar", [np.int64(7), np.array(7), torch.tensor(7), np.bool_(True), torch.tensor(7.0)])
def test_one_token_or_a_count(scalar):
    """A scalar could be either: it is refused, and never seven tokens."""
    manager = KVCacheManager(10, 4)
    compute(manager, "a", range(5))
    before = snapshot(manager)
    for call in (
        lambda: manager.append("a", scalar),
        lambda: manager.add("b", scalar),
        lambda: manager.match_prefix(scalar),
        lambda: manager.append_step(["a"], scalar),
    ):
        with pytest.raises(InvalidArgumentError, match=r"token_ids: expected a sequence of ints, .* for one token"):
            call()
        assert snapshot(manager) == before
    manager.append("a", torch.tensor([7]))
    manager.append("a", [np.int64(7), torch.tensor(7)])
    assert list(manager.sequences["a"].tokens.part(5, 8)) == [7, 7, 7]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hash_fn_that_raises_commits_nothing(error):
    failing = []

    def hash_fn(data: bytes) -> bytes:
        if failing and failing.pop():
            raise error
        return hashlib.sha256(data).digest()

    manager = KVCacheManager(30, 4, hash_fn=hash_fn, record_events=True)
    for name in "ab":
        compute(manager, name, [ord(name)] * 7)
    manager.add("c", range(12))
    manager.allocate_slots("c")
    assert manager.append_step("ab", [1, 2]) is not None
    for call in (lambda: manager.commit("c", 12), lambda: manager.commit_step("ab")):
        before = snapshot(manager)
        failing[:] = [True, False]  # the second call of it
        with pytest.raises(error):
            call()
        assert snapshot(manager) == before
        manager.check_integrity()
        call()
    assert [manager.pool.is_published(manager.block_ids(name)[1]) for name in "abc"] == [True] * 3
