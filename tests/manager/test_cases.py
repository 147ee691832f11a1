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
from pagedkv.errors import BlockReferenceError, InvalidArgumentError, UnknownSequenceError
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
    manager.add("d", [*range(4), *range(20, 33)])
    assert manager.append_step(["a", "b"], [1, 2]) is not None
    for call in (
        lambda: manager.commit("c", 12),
        lambda: manager.commit_step(["a", "b"]),
        lambda: manager.allocate_slots("d"),
        lambda: manager.commit("d", 13),
    ):
        before = snapshot(manager)
        failing[:] = [True, False]  # the second call of it
        with pytest.raises(error):
            call()
        assert snapshot(manager) == before
        manager.check_integrity()
        call()
    assert [manager.pool.is_published(manager.block_ids(name)[1]) for name in "abc"] == [True] * 3
