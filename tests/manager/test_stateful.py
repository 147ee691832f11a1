"""Random operations on two managers of different settings against the naive model, checked after every one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.manager.naive import KEYS, SETTINGS, Harness

tokens = st.lists(st.integers(0, 1), min_size=0, max_size=14)
pick = st.integers(0, 1_000)
MAX_SEQUENCES, MAX_TOKENS = 6, 30


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Harness] = []
        self.counter = 0

    @initialize(names=st.lists(st.sampled_from(sorted(SETTINGS)), min_size=2, max_size=2, unique=True))
    def start(self, names: list[str]) -> None:
        self.sides = [Harness(SETTINGS[name]) for name in names]

    def names(self) -> list[int]:
        return list(self.sides[0].seqs) if self.sides else []

    def name(self, number: int) -> int:
        return self.names()[number % len(self.names())]

    def new_name(self) -> int:
        self.counter += 1
        return self.counter

    @precondition(lambda self: len(self.names()) < MAX_SEQUENCES)
    @rule(token_ids=tokens, key=st.integers(0, len(KEYS) - 1))
    def add(self, token_ids: list[int], key: int) -> None:
        name = self.new_name()
        for side in self.sides:
            side.add(name, token_ids, key)

    @precondition(lambda self: self.names())
    @rule(number=pick, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def append(self, number: int, token_ids: list[int]) -> None:
        for side in self.sides:
            if len(side.seqs[self.name(number)].tokens) < MAX_TOKENS:
                side.append(self.name(number), token_ids)

    @precondition(lambda self: self.names())
    @rule(
        number=pick,
        new=st.none() | st.integers(0, 9),
        external=st.just(0) | st.integers(0, 6),
        ahead=st.just(0) | st.integers(0, 5),
    )
    def allocate(self, number: int, new: int | None, external: int, ahead: int) -> None:
        for side in self.sides:
            side.allocate(self.name(number), new, external, ahead)

    @rule(counts=st.lists(st.integers(0, 20), min_size=MAX_SEQUENCES, max_size=MAX_SEQUENCES))
    def step(self, counts: list[int]) -> None:
        for side in self.sides:
            side.step(dict(zip(side.seqs, counts, strict=False)))

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=MAX_SEQUENCES, max_size=MAX_SEQUENCES))
    def decode(self, token_ids: list[int]) -> None:
        for side in self.sides:
            side.decode([name for name, seq in side.seqs.items() if len(seq.tokens) < MAX_TOKENS], token_ids)

    @precondition(lambda self: self.names())
    @rule(number=pick, part=st.floats(0, 1))
    def truncate(self, number: int, part: float) -> None:
        for side in self.sides:
            name = self.name(number)
            side.truncate(name, round(part * len(side.seqs[name].tokens)))

    @precondition(lambda self: 0 < len(self.names()) < MAX_SEQUENCES)
    @rule(number=pick)
    def fork(self, number: int) -> None:
        name, child = self.name(number), self.new_name()
        for side in self.sides:
            side.fork(name, child)

    @precondition(lambda self: self.names())
    @rule(parents=st.lists(pick, min_size=MAX_SEQUENCES, max_size=MAX_SEQUENCES), count=st.integers(1, MAX_SEQUENCES))
    def reorder(self, parents: list[int], count: int) -> None:
        names = self.names()[:count]
        for side in self.sides:
            side.reorder(names, [parent % len(names) for parent in parents[: len(names)]])

    @precondition(lambda self: self.names())
    @rule(number=pick, mode=st.sampled_from(["recompute", "swap", "swap"]))
    def preempt(self, number: int, mode: str) -> None:
        for side in self.sides:
            side.preempt(self.name(number), mode)

    @precondition(lambda self: self.names())
    @rule(number=pick)
    def free(self, number: int) -> None:
        name = self.name(number)
        for side in self.sides:
            side.free(name)

    @rule()
    def reset(self) -> None:
        for side in self.sides:
            side.reset()

    @rule()
    def duplicate(self) -> None:
        for side in self.sides:
            side.duplicate()

    @invariant()
    def content_is_what_was_computed(self) -> None:
        for side in self.sides:
            side.verify()


def test_against_the_naive_model():
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def act(side: Harness, rng: random.Random, counter: list[int]) -> None:
    """One random operation, weighted towards the life of a served request."""
    names = list(side.seqs)
    if not names or (len(names) < MAX_SEQUENCES and rng.random() < 0.15):
        counter[0] += 1
        side.add(counter[0], [rng.randrange(2) for _ in range(rng.randrange(15))], rng.randrange(len(KEYS)))
        return
    name = rng.choice(names)
    length = len(side.seqs[name].tokens)
    kind = rng.choices(
        [
            "append",
            "allocate",
            "step",
            "decode",
            "truncate",
            "fork",
            "reorder",
            "preempt",
            "free",
            "reset",
            "duplicate",
        ],
        [4, 8, 8, 4, 2, 2, 1, 2, 2, 1, 0.2],
    )[0]
    if kind == "append" and length < MAX_TOKENS:
        side.append(name, [rng.randrange(2) for _ in range(rng.randrange(1, 4))])
    elif kind == "allocate":
        new = rng.choice([None, None, *range(9)])
        side.allocate(name, new, rng.choice([0, 0, 0, 1, 5]), rng.choice([0, 0, 0, 1, 4]))
    elif kind == "step":
        side.step({other: rng.randrange(20) for other in names})
    elif kind == "decode":
        side.decode(
            [other for other in names if len(side.seqs[other].tokens) < MAX_TOKENS], [rng.randrange(2) for _ in names]
        )
    elif kind == "truncate":
        side.truncate(name, rng.randint(length // 2, length))
    elif kind == "fork" and len(names) < MAX_SEQUENCES:
        counter[0] += 1
        side.fork(name, counter[0])
    elif kind == "reorder":
        some = rng.sample(names, rng.randint(1, len(names)))
        side.reorder(some, [rng.randrange(len(some)) for _ in some])
    elif kind == "preempt":
        side.preempt(name, rng.choice(["recompute", "swap"]))
    elif kind == "free":
        side.free(name)
    elif kind == "reset":
        side.reset()
    elif kind == "duplicate":
        side.duplicate()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_random_operations(name: str):
    side: Any = Harness(SETTINGS[name])
    rng, counter = random.Random(name), [0]
    for _ in range(1500):
        act(side, rng, counter)
        side.verify()


def test_100_000_operations_leak_nothing():
    for number, name in enumerate(sorted(SETTINGS)):
        side = Harness(SETTINGS[name], thorough=False)
        rng, counter = random.Random(number), [0]
        for _ in range(100_000 // len(SETTINGS) + 1):
            act(side, rng, counter)
        side.verify()
        for seq in list(side.seqs):
            side.free(seq)
        side.step({})
        side.verify()
        pool, host = side.manager.pool, side.manager.state.moves.host
        assert pool.num_free == pool.num_usable
        assert len(host.free) == len(host.refs)
        assert side.manager.reset_prefix_cache()
        assert not pool.index.by_hash
        assert not pool.index.children
        side.verify()
