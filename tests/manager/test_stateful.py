"""Random operations against the naive model, checked after every one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.manager import allocation, blocks
from tests.manager.naive import KEYS, SETTINGS, Harness

MAX_SEQUENCES, MAX_TOKENS = 6, 30


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


@given(st.sampled_from(sorted(SETTINGS)), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_against_the_naive_model(name: str, rng: random.Random):
    """Short histories, which hypothesis makes shorter still when one fails."""
    side, counter = Harness(SETTINGS[name]), [0]
    for _ in range(40):
        act(side, rng, counter)
        side.verify()


@pytest.mark.parametrize("with_numpy", [True, False])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_random_operations(name: str, with_numpy: bool, monkeypatch: pytest.MonkeyPatch):
    """By numpy at once, short tables too, and by the loops that do without it."""
    monkeypatch.setattr(blocks, "_BULK", 1)
    if not with_numpy:
        for module in (allocation, blocks):
            monkeypatch.setattr(module, "numpy", lambda: None)
    side: Any = Harness(SETTINGS[name])
    rng, counter = random.Random(name), [0]
    for _ in range(1000):
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
