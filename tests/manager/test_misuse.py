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


# calls of the manager by what they raise; the calls of a line are apart by semicolons
MISUSES = {
    errors.UnknownSequenceError: """
        free('x'); append('x', [1]); allocate_slots('x'); commit('x', 1); truncate('x', 0); fork('x', 'y');
        reorder(['a', 'x'], [0, 0]); preempt('x'); block_ids('x'); num_computed_tokens('x'); num_tokens('x');
        explain('x'); append_step(['a', 'x'], [1, 2]); commit_step(['b', 'x'])
    """,
    errors.DuplicateSequenceError: """
        add('a', [1]); fork('a', 'b'); fork('a', 'a'); reorder(['a', 'a'], [0, 0]); append_step(['a', 'a'], [1, 2]);
        commit_step(['b', 'b'])
    """,
    errors.InvalidArgumentError: """
        reorder(['a', 'b'], [0]); reorder(['a', 'b'], [0, 2]); reorder(['a', 'b'], [0, -1]);
        reorder(['a', 'b'], [0, 0.5]); reorder(['a', 'b'], 5); reorder(5, [0]); reorder(['a', []], [0, 0]);
        append_step(5, [1]); append_step([[]], [1]); commit_step(5); commit_step(['free', []]); free([]);
        allocate_slots({}); add([], [1]); fork('a', []); add('new', {1, 2}); add('new', {1: 2});
        append('a', frozenset({1})); stats('x'); add('new', ['x']); add('new', [1], extra_keys=[('image', 1, 2)]);
        add('new', [1], extra_keys=[(1, 2)]); add('new', [1], extra_keys=[('image', 1, 5, 5)]);
        match_prefix([1, 'x']); append('a', [1, None]); add('new', [1, -1]); match_prefix([1, -1]); append('a', [-1]);
        append_step(['a'], [-1]); append('a', -2); allocate_slots('a', -1); allocate_slots('waiting', 1.5);
        allocate_slots('a', num_lookahead_tokens=-1); allocate_slots('a', num_external_tokens=-1);
        allocate_slots('waiting', num_external_tokens=8); allocate_slots('b', num_external_tokens=3); commit('a', -1);
        truncate('a', 1.5); preempt('a', 'drop'); append_step(['a'], [1, 2]); append_step(['a'], 1);
        append_step(['a', 'waiting'], [1, 2]); append_step(['a', 'b'], [1, 2]); append_step(['swapped'], [1]);
        pool.get_new_blocks(1.5); pool.get_new_blocks(-1)
    """,
    errors.CommitError: """
        commit('a', 1); commit('waiting', 1); commit('swapped', 1); commit_step(['free', 'a'])
    """,
    errors.PendingCopyError: """
        commit('b', 1); commit_step(['b'])
    """,
    errors.TruncationError: """
        truncate('a', 11); truncate('a', -1)
    """,
    errors.BlockReferenceError: """
        pool.free_blocks([29]); pool.free_blocks([1, 1, 1]); pool.publish(29, b'h'); pool.publish(1, b'another')
    """,
    errors.UnknownBlockError: """
        pool.free_blocks([0]); pool.touch([1, 0]); pool.touch([1, 30]); pool.touch([1, 1.5]); pool.evict([1, -1])
    """,
    errors.OutOfBlocksError: """
        pool.get_new_blocks(29)
    """,
}


@pytest.mark.parametrize(
    ("error", "call"), [(error, call.strip()) for error, calls in MISUSES.items() for call in calls.split(";")]
)
def test_misuse_changes_nothing(error, call):
    manager = busy()
    before = snapshot(manager)
    with pytest.raises(error) as raised:
        eval(f"manager.{call}")
    assert type(raised.value) is error
    assert isinstance(raised.value, errors.PagedKVError)
    assert snapshot(manager) == before
    manager.check_integrity()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_blocks", 5.5, "an int"),
        ("num_blocks", None, "an int"),
        ("num_blocks", 1, "at least 2 (one is the null block)"),
        ("num_blocks", 2**62, f"at most {2**31}"),
        ("num_host_blocks", 2**62, f"at most {2**31}"),
        ("num_host_blocks", -1, "at least 0"),
        ("num_host_blocks", None, "an int"),
        ("block_size", 2**70, f"at most {2**31 - 1}"),
        ("block_size", 0, "at least 1"),
        ("block_size", 4.0, "an int"),
        ("block_size", "16", "an int"),
        ("enable_prefix_caching", "no", "a bool"),
        ("partial_hits", 1, "a bool"),
        ("record_events", "no", "a bool"),
        ("causal", "no", "a bool"),
        ("groups", "x", "a sequence of GroupSpecs"),
        ("groups", 5, "a sequence of GroupSpecs"),
        ("watermark", math.nan, "a fraction in [0, 1)"),
        ("watermark", 1.0, "a fraction in [0, 1)"),
        ("watermark", -0.1, "a fraction in [0, 1)"),
        ("watermark", "0.1", "a fraction in [0, 1)"),
        ("sliding_window", 0, "at least 1"),
        ("sliding_window", 4.5, "an int"),
    ],
)
def test_settings_are_named(name, value, expected):
    with pytest.raises(errors.InvalidArgumentError) as raised:
        KVCacheManager(**{"num_blocks": 10, "block_size": 4, name: value})
    assert str(raised.value) == f"{name}: expected {expected}, got {value!r}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": [GroupSpec(), "x"]}, "groups: expected GroupSpecs, got 'x'"),
        ({"groups": []}, "groups: expected at least one GroupSpec, got none"),
        ({"groups": [GroupSpec()], "sliding_window": 8}, "sliding_window: expected None with groups, which have"),
        (
            {"groups": [GroupSpec(), GroupSpec(block_size=2)], "partial_hits": True},
            "partial_hits: expected groups of one",
        ),
        ({"partial_hits": True, "enable_prefix_caching": False}, "partial_hits: expected False without prefix caching"),
        ({"hash_fn": lambda data: 7}, "hash_fn: expected it to return bytes, got int"),
        ({"hash_fn": "md5"}, "hash_fn: expected \"sha256\" or a callable from bytes to bytes, got 'md5'"),
    ],
)
def test_settings_that_exclude_one_another(settings, message):
    with pytest.raises(errors.InvalidArgumentError, match=f"^{re.escape(message)}"):
        KVCacheManager(10, 4, **settings)


@pytest.mark.parametrize(
    "arguments", [("global",), ("sliding",), ("sliding", 0), ("full", 4), ("full", None, 0), ("chunked", 1.5)]
)
def test_specs_that_are_none(arguments):
    with pytest.raises(errors.InvalidArgumentError, match="GroupSpec"):
        GroupSpec(*arguments)


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


@pytest.mark.parametrize(
    "change",
    [
        "pool.touch([1])",
        "pool.get_new_blocks(1)",
        "pool.pins.clear()",
        "pool.pin(1)",
        "pool.refs.__setitem__(29, 1)",
        "pool.index.hashes.__setitem__(1, None)",
        "pool.index.by_hash.update({next(iter(pool.index.by_hash)): 29})",
        "pool._next.__setitem__(pool._prev[0], pool._next[0])",
        "setattr(pool, 'num_free', pool.num_free - 1)",
        "state.moves.copies.clear()",
        "state.moves.host.refs.__setitem__(0, 2)",
        "state.moves.host.free.pop()",
        "setattr(state, 'num_running', 7)",
        "a.tables[0].append(29)",
        "a.tables[0].pop()",
        "a.tables[0].__setitem__(0, 0)",
        "setattr(a, 'num_computed', 11)",
        "setattr(a, 'num_granted', 100)",
        "pool.flags.__setitem__(twin, 1)",
        "pool._num_used.__setitem__(1, 5)",
    ],
)
def test_integrity_check_finds(change):
    manager = busy()
    manager.add("twin", range(4))
    (twin,) = manager.allocate_slots("twin").new_block_ids
    manager.commit("twin", 4)
    manager.check_integrity()
    eval(change, {"pool": manager.pool, "state": manager.state, "a": manager.sequences["a"], "twin": twin})
    with pytest.raises(errors.IntegrityError):
        manager.check_integrity()
