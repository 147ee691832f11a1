"""What a call costs does not depend on what the sequence holds: bytecodes run and bytes allocated, not time."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.manager import GroupSpec, KVCacheManager
from pagedkv.manager.hashing import KeySet
from tests.manager.actions import cache, compute


def cost(call: Callable[[], Any]) -> int:
    """Bytecodes that a call runs."""
    count = 0

    def count_opcodes(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return count_opcodes

    tracer = sys.gettrace()
    sys.settrace(count_opcodes)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return count


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once."""
    tracemalloc.start()
    call()
    bytes_at_most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return bytes_at_most


def _decode(manager: KVCacheManager) -> None:
    manager.append("a", [1])
    manager.allocate_slots("a", 1)
    manager.commit("a", 1)


def _decode_step(manager: KVCacheManager) -> None:
    manager.append_step(["a"], [1])
    manager.commit_step(["a"])


def _chunk(manager: KVCacheManager) -> None:
    manager.append("a", range(32))
    manager.allocate_slots("a", num_lookahead_tokens=4)
    manager.commit("a", 32)


def _reject(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", num_lookahead_tokens=16)
    manager.truncate("a", manager.num_tokens("a"))


CALLS = {"decode": _decode, "decode_step": _decode_step, "chunk": _chunk, "reject": _reject}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uncached": {"enable_prefix_caching": False},
    "hybrid": {"groups": [GroupSpec(), GroupSpec("sliding", 256)]},
    # a copy that another sequence waits for makes every commit look at its own blocks
    "pending": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("settings", sorted(SETTINGS))
@pytest.mark.parametrize("call", sorted(CALLS))
def test_cost_does_not_grow_with_what_is_there(call, settings):
    found = []
    for length in (512, 64_000):
        manager = KVCacheManager(20_000, 8, **SETTINGS[settings])
        compute(manager, "a", range(length))
        _decode(manager)  # gives back what the window has passed in the prompt
        if settings == "pending":
            compute(manager, "b", range(3))
            manager.fork("b", "c")
            manager.append("c", [1])
            manager.allocate_slots("c")
        # the least of many: arrays grow now and then, and every eighth token fills a block
        step = functools.partial(CALLS[call], manager)
        work = [cost(step) for _ in range(8)]
        held = [peak(step) for _ in range(8)]
        found.append((min(work), max(work), min(held)))
    (least, most, held), (later_least, later_most, later_held) = found
    assert later_least <= least + 8
    assert later_most <= most + 64
    assert later_held <= held + 2048


def test_keys_of_a_block_do_not_cost_those_of_other_blocks():
    """A thousand images of a long prompt: each block looks at its own."""
    few, many = (KeySet([("image", n, 32 * n, 32 * n + 20) for n in range(count)], None) for count in (10, 1000))
    for start in (0, 64, 288):
        assert few.at(start, start + 16) == many.at(start, start + 16) != ()
        assert cost(lambda: many.at(start, start + 16)) == cost(lambda: few.at(start, start + 16))  # noqa: B023


def test_overlapping_ranges_are_all_found():
    rng = random.Random(0)
    spans = [(start, start + rng.randint(1, 60)) for start in (rng.randrange(100) for _ in range(12))]
    keys = KeySet([("image", number, *span) for number, span in enumerate(spans)], None)
    for start in range(0, 160, 8):
        assert len(keys.at(start, start + 8)) == sum(low < start + 8 and high > start for low, high in spans)


def test_chunked_admission_is_linear():
    manager = KVCacheManager(20_000, 16)
    manager.add("a", range(256_000))

    def admit() -> None:
        granted = manager.allocate_slots("a", 512)
        manager.commit("a", len(granted.slots))

    costs = [cost(admit) for _ in range(500)]
    assert max(costs[1:]) <= 1.1 * min(costs)


def test_forks_share_token_ids():
    manager = KVCacheManager(10_000, 16)
    compute(manager, "a", range(100_000))
    table = 8 * len(manager.block_ids("a"))
    held = peak(lambda: [manager.fork("a", number) for number in range(100)])
    assert held < 100 * (table + 4096)  # 800,000 bytes of ids each before
    for number in range(3):
        manager.append(number, [7, number, 7, 7])
    manager.truncate(2, 99_990)
    manager.append(2, range(10))
    ids = [manager.sequences[name].tokens for name in ("a", 0, 1, 2)]
    assert [len(tokens) for tokens in ids] == [100_000, 100_004, 100_004, 100_000]
    assert list(ids[0].part(99_989, 100_001)) == list(range(99_989, 100_000))
    assert list(ids[1].part(99_998, 100_004)) == [99_998, 99_999, 7, 0, 7, 7]
    assert list(ids[3].part(99_988, 99_992)) == [99_988, 99_989, 0, 1]
    manager.check_integrity()


def test_beams_share_token_ids():
    """A reorder per token keeps few pieces, each read right."""
    manager = KVCacheManager(2_000, 4)
    compute(manager, 0, range(50))
    manager.fork(0, 1)
    expected = [list(range(50)) for _ in range(2)]
    for token in range(1000):
        assert manager.append_step([0, 1], [token, token + 1]) is not None
        manager.take_copies()
        manager.commit_step([0, 1])
        expected = [[*expected[token % 2], token + token % 2]] * 2
        manager.reorder([0, 1], [token % 2] * 2)
    for name in (0, 1):
        ids = manager.sequences[name].tokens
        assert list(ids.part(0, len(ids))) == expected[name]
        assert len(ids._pieces) <= 1050 // 256
        assert manager.match_prefix(expected[name]) == 1048
    manager.check_integrity()


def test_block_ids_are_read_when_asked_for():
    manager = KVCacheManager(20, 4)
    first = compute(manager, "a", range(6))
    assert first.block_ids == [1, 2]
    manager.append("a", range(6))
    second = manager.allocate_slots("a")
    assert first.block_ids == second.block_ids == [1, 2, 3]
    ((columns, blocks),) = second.entries
    assert (second.new_block_ids, list(columns), blocks) == ([3], [2], [3])
    manager.preempt("a")
    assert first.block_ids == []
    third = manager.allocate_slots("a")
    ((columns, blocks),) = third.entries
    assert (list(columns), blocks) == ([0, 1, 2], third.block_ids)
    manager.free("a")
    assert third.block_ids == []


def test_what_was_published_meanwhile_is_not_hashed_again():
    hashed = []
    manager = KVCacheManager(40, 4, hash_fn=lambda data: hashed.append(data) or hashlib.sha256(data).digest())
    for name in "ab":
        manager.add(name, range(40))
        manager.allocate_slots(name)
    manager.commit("a", 40)
    del hashed[:]
    manager.commit("b", 40)
    assert not hashed
    assert manager.sequences["a"].tip is manager.sequences["b"].tip
    manager.check_integrity()


def test_repeated_answers_leave_an_unrelated_prefix():
    """A freed twin of a published block is reused first, so that repetitions take no more than their own blocks."""
    manager = KVCacheManager(20_000, 16)
    cache(manager, range(100_000, 108_000))
    for _ in range(2_000):
        manager.add("again", range(96))
        for answer in ((), range(200, 264)):
            manager.append("again", answer)
            manager.commit("again", len(manager.allocate_slots("again").slots))
        manager.free("again")
    assert manager.match_prefix(range(100_000, 108_001)) == 8_000
    assert manager.match_prefix([*range(96), *range(200, 264), 1]) == 160
    assert manager.pool.num_published < 500 + 2 * 10
    manager.check_integrity()
