"""Every misuse raises a named error that says what came, and leaves everything as it was."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from pagedkv import errors
from pagedkv.manager import GroupSpec, KVCacheManager
from tests.manager.actions import compute, run, snapshot

PLAIN = "expected plain values (None, bool, int, float, str, bytes, containers of them)"


def busy() -> KVCacheManager:
    """A manager with a bit of everything: shared blocks, a pending copy, a swapped and a waiting sequence."""
    manager = KVCacheManager(30, 4, num_host_blocks=4, record_events=True)
    compute(manager, "a", range(10))
    compute(manager, "swapped", range(50, 56))
    manager.preempt("swapped", "swap")
    manager.fork("a", "b")
    manager.append("b", [1, 2])
    manager.allocate_slots("b")
    manager.add("waiting", range(7))
    manager.add("free", range(60, 62))  # one token to commit
    manager.allocate_slots("free")
    manager.commit("free", 1)
    return manager


MISUSES: list[tuple[str, type[Exception], Any]] = [
    ("free unknown", errors.UnknownSequenceError, lambda m: m.free("x")),
    ("append unknown", errors.UnknownSequenceError, lambda m: m.append("x", [1])),
    ("allocate unknown", errors.UnknownSequenceError, lambda m: m.allocate_slots("x")),
    ("commit unknown", errors.UnknownSequenceError, lambda m: m.commit("x", 1)),
    ("truncate unknown", errors.UnknownSequenceError, lambda m: m.truncate("x", 0)),
    ("fork unknown", errors.UnknownSequenceError, lambda m: m.fork("x", "y")),
    ("reorder unknown", errors.UnknownSequenceError, lambda m: m.reorder(["a", "x"], [0, 0])),
    ("preempt unknown", errors.UnknownSequenceError, lambda m: m.preempt("x")),
    ("block_ids unknown", errors.UnknownSequenceError, lambda m: m.block_ids("x")),
    ("num_computed unknown", errors.UnknownSequenceError, lambda m: m.num_computed_tokens("x")),
    ("num_tokens unknown", errors.UnknownSequenceError, lambda m: m.num_tokens("x")),
    ("explain unknown", errors.UnknownSequenceError, lambda m: m.explain("x")),
    ("append_step unknown", errors.UnknownSequenceError, lambda m: m.append_step(["a", "x"], [1, 2])),
    ("commit_step unknown", errors.UnknownSequenceError, lambda m: m.commit_step(["b", "x"])),
    ("add twice", errors.DuplicateSequenceError, lambda m: m.add("a", [1])),
    ("fork onto an id", errors.DuplicateSequenceError, lambda m: m.fork("a", "b")),
    ("fork onto itself", errors.DuplicateSequenceError, lambda m: m.fork("a", "a")),
    ("reorder twice", errors.DuplicateSequenceError, lambda m: m.reorder(["a", "a"], [0, 0])),
    ("append_step twice", errors.DuplicateSequenceError, lambda m: m.append_step(["a", "a"], [1, 2])),
    ("commit_step twice", errors.DuplicateSequenceError, lambda m: m.commit_step(["b", "b"])),
    ("parents too few", errors.InvalidArgumentError, lambda m: m.reorder(["a", "b"], [0])),
    ("parents out of range", errors.InvalidArgumentError, lambda m: m.reorder(["a", "b"], [0, 2])),
    ("parents negative", errors.InvalidArgumentError, lambda m: m.reorder(["a", "b"], [0, -1])),
    ("parents not ints", errors.InvalidArgumentError, lambda m: m.reorder(["a", "b"], [0, 0.5])),
    ("parents not a sequence", errors.InvalidArgumentError, lambda m: m.reorder(["a", "b"], 5)),
    ("reorder not a sequence", errors.InvalidArgumentError, lambda m: m.reorder(5, [0])),
    ("reorder unhashable", errors.InvalidArgumentError, lambda m: m.reorder(["a", []], [0, 0])),
    ("append_step not a sequence", errors.InvalidArgumentError, lambda m: m.append_step(5, [1])),
    ("append_step unhashable", errors.InvalidArgumentError, lambda m: m.append_step([[]], [1])),
    ("commit_step not a sequence", errors.InvalidArgumentError, lambda m: m.commit_step(5)),
    ("commit_step unhashable", errors.InvalidArgumentError, lambda m: m.commit_step(["free", []])),
    ("free unhashable", errors.InvalidArgumentError, lambda m: m.free([])),
    ("allocate unhashable", errors.InvalidArgumentError, lambda m: m.allocate_slots({})),
    ("add unhashable", errors.InvalidArgumentError, lambda m: m.add([], [1])),
    ("fork unhashable", errors.InvalidArgumentError, lambda m: m.fork("a", [])),
    ("add a set", errors.InvalidArgumentError, lambda m: m.add("new", {1, 2})),
    ("add a dict", errors.InvalidArgumentError, lambda m: m.add("new", {1: 2})),
    ("append a set", errors.InvalidArgumentError, lambda m: m.append("a", frozenset({1}))),
    ("stats of a str", errors.InvalidArgumentError, lambda m: m.stats("x")),
    ("add bad tokens", errors.InvalidArgumentError, lambda m: m.add("new", ["x"])),
    ("add bad keys", errors.InvalidArgumentError, lambda m: m.add("new", [1], extra_keys=[("image", 1, 2)])),
    ("add bad kind", errors.InvalidArgumentError, lambda m: m.add("new", [1], extra_keys=[(1, 2)])),
    ("add bad range", errors.InvalidArgumentError, lambda m: m.add("new", [1], extra_keys=[("image", 1, 5, 5)])),
    ("match bad tokens", errors.InvalidArgumentError, lambda m: m.match_prefix([1, "x"])),
    ("append bad tokens", errors.InvalidArgumentError, lambda m: m.append("a", [1, None])),
    ("add a negative id", errors.InvalidArgumentError, lambda m: m.add("new", [1, -1])),
    ("match a negative id", errors.InvalidArgumentError, lambda m: m.match_prefix([1, -1])),
    ("append a negative id", errors.InvalidArgumentError, lambda m: m.append("a", [-1])),
    ("append_step a negative id", errors.InvalidArgumentError, lambda m: m.append_step(["a"], [-1])),
    ("append negative count", errors.InvalidArgumentError, lambda m: m.append("a", -2)),
    ("allocate negative", errors.InvalidArgumentError, lambda m: m.allocate_slots("a", -1)),
    ("allocate a float", errors.InvalidArgumentError, lambda m: m.allocate_slots("waiting", 1.5)),
    ("lookahead negative", errors.InvalidArgumentError, lambda m: m.allocate_slots("a", num_lookahead_tokens=-1)),
    ("external negative", errors.InvalidArgumentError, lambda m: m.allocate_slots("a", num_external_tokens=-1)),
    ("external too many", errors.InvalidArgumentError, lambda m: m.allocate_slots("waiting", num_external_tokens=8)),
    ("external too many, running", errors.InvalidArgumentError, lambda m: m.allocate_slots("b", num_external_tokens=3)),
    ("commit negative", errors.InvalidArgumentError, lambda m: m.commit("a", -1)),
    ("commit past the tokens", errors.CommitError, lambda m: m.commit("a", 1)),
    ("commit past the slots", errors.CommitError, lambda m: m.commit("waiting", 1)),
    ("commit while swapped", errors.CommitError, lambda m: m.commit("swapped", 1)),
    ("commit_step past the tokens", errors.CommitError, lambda m: m.commit_step(["free", "a"])),
    ("commit into a pending copy", errors.PendingCopyError, lambda m: m.commit("b", 1)),
    ("commit_step into a pending copy", errors.PendingCopyError, lambda m: m.commit_step(["b"])),
    ("truncate past the length", errors.TruncationError, lambda m: m.truncate("a", 11)),
    ("truncate negative", errors.TruncationError, lambda m: m.truncate("a", -1)),
    ("truncate a float", errors.InvalidArgumentError, lambda m: m.truncate("a", 1.5)),
    ("preempt mode", errors.InvalidArgumentError, lambda m: m.preempt("a", "drop")),
    ("append_step counts", errors.InvalidArgumentError, lambda m: m.append_step(["a"], [1, 2])),
    ("append_step a count", errors.InvalidArgumentError, lambda m: m.append_step(["a"], 1)),
    ("append_step waiting", errors.InvalidArgumentError, lambda m: m.append_step(["a", "waiting"], [1, 2])),
    ("append_step uncommitted", errors.InvalidArgumentError, lambda m: m.append_step(["a", "b"], [1, 2])),
    ("append_step swapped", errors.InvalidArgumentError, lambda m: m.append_step(["swapped"], [1])),
    ("pool: free a free block", errors.BlockReferenceError, lambda m: m.pool.free_blocks([29])),
    ("pool: free too often", errors.BlockReferenceError, lambda m: m.pool.free_blocks([1, 1, 1])),
    ("pool: null block", errors.UnknownBlockError, lambda m: m.pool.free_blocks([0])),
    ("pool: touch the null block", errors.UnknownBlockError, lambda m: m.pool.touch([1, 0])),
    ("pool: out of range", errors.UnknownBlockError, lambda m: m.pool.touch([1, 30])),
    ("pool: a float", errors.UnknownBlockError, lambda m: m.pool.touch([1, 1.5])),
    ("pool: a count that is none", errors.InvalidArgumentError, lambda m: m.pool.get_new_blocks(1.5)),
    ("pool: negative", errors.UnknownBlockError, lambda m: m.pool.evict([1, -1])),
    ("pool: too many", errors.OutOfBlocksError, lambda m: m.pool.get_new_blocks(29)),
    ("pool: negative count", errors.InvalidArgumentError, lambda m: m.pool.get_new_blocks(-1)),
    ("pool: publish a free block", errors.BlockReferenceError, lambda m: m.pool.publish(29, b"h")),
    ("pool: publish twice", errors.BlockReferenceError, lambda m: m.pool.publish(1, b"another")),
]


@pytest.mark.parametrize(("error", "misuse"), [row[1:] for row in MISUSES], ids=[row[0] for row in MISUSES])
def test_misuse_changes_nothing(error, misuse):
    manager = busy()
    before = snapshot(manager)
    with pytest.raises(error) as raised:
        misuse(manager)
    assert type(raised.value) is error
    assert isinstance(raised.value, errors.PagedKVError)
    assert snapshot(manager) == before
    manager.check_integrity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 5.5}, "num_blocks: expected an int, got 5.5"),
        ({"num_blocks": 1}, "num_blocks: expected at least 2 (one is the null block), got 1"),
        ({"num_blocks": 2**62}, f"num_blocks: expected at most {2**31}, got {2**62}"),
        ({"num_host_blocks": 2**62}, f"num_host_blocks: expected at most {2**31}, got {2**62}"),
        ({"block_size": 2**70}, f"block_size: expected at most {2**31 - 1}, got {2**70}"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: expected a bool, got 'no'"),
        ({"partial_hits": 1}, "partial_hits: expected a bool, got 1"),
        ({"record_events": "no"}, "record_events: expected a bool, got 'no'"),
        ({"causal": "no"}, "causal: expected a bool, got 'no'"),
        ({"groups": "x"}, "groups: expected a sequence of GroupSpecs, got 'x'"),
        ({"groups": 5}, "groups: expected a sequence of GroupSpecs, got 5"),
        ({"groups": [GroupSpec(), "x"]}, "groups: expected GroupSpecs, got 'x'"),
        ({"num_blocks": None}, "num_blocks: expected an int, got None"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"block_size": 4.0}, "block_size: expected an int, got 4.0"),
        ({"watermark": math.nan}, "watermark: expected a fraction in [0, 1), got nan"),
        ({"watermark": 1.0}, "watermark: expected a fraction in [0, 1), got 1.0"),
        ({"watermark": -0.1}, "watermark: expected a fraction in [0, 1), got -0.1"),
        ({"num_host_blocks": -1}, "num_host_blocks: expected at least 0, got -1"),
        ({"sliding_window": 0}, "sliding_window: expected at least 1, got 0"),
        (
            {"partial_hits": True, "enable_prefix_caching": False},
            "partial_hits: expected False without prefix caching",
        ),
        (
            {"groups": [GroupSpec()], "sliding_window": 8},
            "sliding_window: expected None with groups, which have windows of their own",
        ),
        ({"block_size": "16"}, "block_size: expected an int, got '16'"),
        ({"num_host_blocks": None}, "num_host_blocks: expected an int, got None"),
        ({"sliding_window": 4.5}, "sliding_window: expected an int, got 4.5"),
        ({"watermark": "0.1"}, "watermark: expected a fraction in [0, 1), got '0.1'"),
    ],
)
def test_settings_are_named(settings, message):
    with pytest.raises(errors.InvalidArgumentError, match=f"^{re.escape(message)}$"):
        KVCacheManager(**{"num_blocks": 10, "block_size": 4, **settings})


def nested(depth: int | None) -> list[Any]:
    """Lists in lists; None: a list in itself."""
    value: list[Any] = []
    if depth is None:
        value.append(value)
    for _ in range(depth or 0):
        value = [value]
    return value


DEEP = "expected values that are not nested so deeply, nor in themselves"


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda m: m.add("new", True), "token_ids: expected a sequence of ints, or a count, got bool"),
        (lambda m: m.append("a", "text"), "token_ids: expected a sequence of ints, or a count, got str"),
        (lambda m: m.append("a", [True]), "token_ids: expected a sequence of ints, got bools"),
        (lambda m: m.match_prefix(np.array([True, False])), "token_ids: expected a sequence of ints, got bools"),
        (lambda m: m.add("new", [1], cache_salt=nested(None)), f"cache_salt: {DEEP}"),
        (lambda m: m.match_prefix([1], cache_salt=nested(10**5)), f"cache_salt: {DEEP}"),
        (lambda m: m.add("new", [1], extra_keys=[("x", nested(None))]), f"extra_keys: {DEEP}"),
        (lambda m: m.add("new", [1], cache_salt=object()), f"cache_salt: {PLAIN}, got object"),
        (lambda m: m.add("new", [1], extra_keys=[("x", [object()])]), f"extra_keys: {PLAIN}, got object"),
        (lambda m: m.add("new", [1], extra_keys="x"), "extra_keys: expected a sequence of tuples, got 'x'"),
        (lambda m: m.reorder("a", [0]), "seq_ids: expected a sequence of hashable ids, got 'a'"),
        (lambda m: m.reorder(["a"], "0"), "parents: expected a sequence of indices, got '0'"),
        (lambda m: m.append_step("a", [1]), "seq_ids: expected a sequence of hashable ids, got 'a'"),
        (lambda m: m.commit_step("a"), "seq_ids: expected a sequence of hashable ids, got 'a'"),
    ],
)
def test_misuse_is_named(misuse, message):
    manager = busy()
    before = snapshot(manager)
    with pytest.raises(errors.InvalidArgumentError, match=f"^{re.escape(message)}$"):
        misuse(manager)
    assert snapshot(manager) == before


def test_attention_that_is_not_causal_is_prefilled_at_once():
    with pytest.raises(errors.NonCausalError, match="enable_prefix_caching"):
        KVCacheManager(10, 4, causal=False)
    manager = KVCacheManager(10, 4, enable_prefix_caching=False, causal=False)
    manager.add("a", range(10))
    before = snapshot(manager)
    for options in ({"num_new_tokens": 4}, {"num_new_tokens": 0}, {"num_new_tokens": 4, "num_external_tokens": 4}):
        with pytest.raises(errors.NonCausalError, match="not causal"):
            manager.allocate_slots("a", **options)
        assert snapshot(manager) == before
    assert len(run(manager, "a").slots) == 10
    manager.append("a", [1])
    assert len(run(manager, "a", 1).slots) == 1


def test_reset_while_in_use():
    manager = busy()
    before = snapshot(manager)
    assert manager.reset_prefix_cache() is False
    assert snapshot(manager) == before
    for name in ("a", "b", "free"):
        manager.free(name)
    manager.take_copies()
    assert manager.reset_prefix_cache() is True
    manager.check_integrity()
    assert manager.match_prefix(range(10)) == 0
    assert manager.take_events()[-1] == ("cleared",)
    assert manager.pool.get_new_blocks(3) == [1, 2, 3]


def test_reset_while_a_source_is_pinned():
    manager = KVCacheManager(10, 4, partial_hits=True)
    compute(manager, "a", range(8))
    manager.free("a")
    manager.add("b", range(6))
    manager.allocate_slots("b")
    assert manager.reset_prefix_cache() is False
    manager.free("b")
    assert manager.reset_prefix_cache() is True
    manager.check_integrity()
    assert manager.match_prefix(range(6)) == 0


def broken(change: Any) -> KVCacheManager:
    manager = busy()
    change(manager)
    return manager


def _repeat_in_queue(manager: KVCacheManager) -> None:
    manager.pool._next[manager.pool._prev[0]] = manager.pool._next[0]


def _move_hash(manager: KVCacheManager) -> None:
    block_hash, block = next(iter(manager.pool.index.by_hash.items()))
    manager.pool.index.by_hash[block_hash] = block + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pool.touch([1]),
        lambda m: m.pool.get_new_blocks(1),
        lambda m: m.pool.pins.clear(),
        lambda m: m.pool.pin(1),
        lambda m: m.state.moves.copies.clear(),
        lambda m: m.sequences["a"].tables[0].append(29),
        lambda m: m.sequences["a"].tables[0].pop(),
        lambda m: m.sequences["a"].tables[0].__setitem__(0, 0),
        lambda m: setattr(m.pool, "num_free", m.pool.num_free - 1),
        lambda m: m.pool.refs.__setitem__(29, 1),
        lambda m: m.pool.index.hashes.__setitem__(1, None),
        lambda m: m.state.moves.host.refs.__setitem__(0, 2),
        lambda m: m.state.moves.host.free.pop(),
        lambda m: setattr(m.state, "num_running", 7),
        lambda m: setattr(m.sequences["a"], "num_computed", 11),
        lambda m: setattr(m.sequences["a"], "num_granted", 100),
        _repeat_in_queue,
        _move_hash,
    ],
)
def test_integrity_check_finds(change):
    busy().check_integrity()
    with pytest.raises(errors.IntegrityError):
        broken(change).check_integrity()
