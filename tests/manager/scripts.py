"""Scripts of actions and what they lead to, so that a case of the manager is a row of a table.

A script is a list of steps between semicolons. An action is a verb, a sequence and numbers::

    add a 0:4,9         add a #4 (a count)      append a 5        compute a 0:4 (add, run)    cache 0:4 (compute, free)
    run a [3]           allocates (so many, or all that remain), applies moves, commits
    allocate a [3] [ahead=2] [external=4]       commit a 3        truncate a 3                free a
    fork a b            reorder a b by 1 0      preempt a [swap]  evict 1 2
    decode a b          `append_step` of one token each           committed a b (`commit_step`)

The integrity of everything is checked after each. `ACTION -> SomeError` has to raise, and to change nothing; `preempt`
and `decode` (rows, columns, blocks) give an answer.
`QUESTION -> ANSWER` asks: a (blocks of a sequence), free, hit 0:4 (tokens), copies, swaps (outs | ins), host (blocks
used), refs 1 2, published 1 2, removed (events), and of the last allocation: cached, new, slots, ahead, granted.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv import errors
from pagedkv.manager import Allocation, KVCacheManager
from tests.manager.actions import run, snapshot


def token_ids(text: str) -> list[int] | int:
    if text.startswith("#"):
        return int(text[1:])
    ids: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition(":")
        ids += range(int(low), int(high)) if high else [int(low)]
    return ids


class Script:
    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.granted: Allocation | None = None

    def play(self, text: str) -> None:
        for step in filter(None, (part.strip() for part in text.replace("\n", " ").split(";"))):
            words, arrow, expected = (part.strip() for part in step.partition("->"))
            verb, *arguments = words.split()
            action = getattr(self, f"do_{verb}", None)
            if action is None:
                found = self.answer(verb, arguments)
                assert found == expected, f"{step}: found {found!r}"
            elif expected.endswith("Error"):
                before = snapshot(self.manager)
                with pytest.raises(getattr(errors, expected)):
                    action(*arguments)
                assert snapshot(self.manager) == before
            else:
                found = _text(action(*arguments))
                assert not arrow or found == expected, f"{step}: found {found!r}"
                self.manager.check_integrity()

    def do_add(self, name: str, ids: str) -> None:
        self.manager.add(name, token_ids(ids))

    def do_append(self, name: str, ids: str) -> None:
        self.manager.append(name, token_ids(ids))

    def do_allocate(self, name: str, *options: str) -> None:
        named = {"ahead": "num_lookahead_tokens", "external": "num_external_tokens"}
        pairs = [option.split("=") for option in options if "=" in option]
        count = next((int(option) for option in options if "=" not in option), None)
        before = snapshot(self.manager)
        self.granted = self.manager.allocate_slots(name, count, **{named[key]: int(value) for key, value in pairs})
        assert self.granted is not None or snapshot(self.manager) == before

    def do_run(self, name: str, count: str | None = None) -> None:
        self.granted = run(self.manager, name, None if count is None else int(count))

    def do_compute(self, name: str, ids: str) -> None:
        self.do_add(name, ids)
        self.do_run(name)

    def do_cache(self, ids: str) -> None:
        self.do_compute("cache", ids)
        self.manager.free("cache")

    def do_commit(self, name: str, count: str) -> None:
        self.manager.commit(name, int(count))

    def do_truncate(self, name: str, length: str) -> None:
        self.manager.truncate(name, int(length))

    def do_fork(self, parent: str, child: str) -> None:
        self.manager.fork(parent, child)

    def do_reorder(self, *words: str) -> None:
        by = words.index("by")
        self.manager.reorder(words[:by], [int(parent) for parent in words[by + 1 :]])

    def do_preempt(self, name: str, mode: str = "recompute") -> str:
        return self.manager.preempt(name, mode)

    def do_decode(self, *names: str) -> Any:
        before = snapshot(self.manager)
        step = self.manager.append_step(names, range(7, 7 + len(names)))
        if step is None:
            assert snapshot(self.manager) == before
            return None
        return [list(map(list, entries)) for entries in step.entries]

    def do_committed(self, *names: str) -> None:
        self.manager.commit_step(names)

    def do_free(self, name: str) -> None:
        self.manager.free(name)

    def do_evict(self, *blocks: str) -> None:
        self.manager.pool.evict([int(block) for block in blocks])

    def answer(self, question: str, arguments: list[str]) -> str:
        manager, granted = self.manager, self.granted
        answers: dict[str, Any] = {
            "free?": lambda: manager.num_free_blocks,
            "hit": lambda: manager.match_prefix(token_ids(arguments[0])),
            "copies": lambda: [f"{source}>{to}" for source, to in manager.take_copies()],
            "swaps": lambda: self._swaps(),
            "host": lambda: manager.stats().num_used_host_blocks,
            "refs": lambda: [manager.pool.refs[int(block)] for block in arguments],
            "published": lambda: [int(manager.pool.is_published(int(block))) for block in arguments],
            "removed": lambda: [event[0] for event in manager.take_events()].count("removed"),
            "granted": lambda: granted is not None,
            "cached": lambda: granted.num_cached_tokens,
            "new": lambda: granted.new_block_ids,
            "slots": lambda: granted.slots,
            "ahead": lambda: granted.lookahead_slots,
        }
        return _text(answers[question]() if question in answers else manager.block_ids(question))

    def _swaps(self) -> list[str]:
        outs, ins = ([f"{source}>{to}" for source, to in pairs] for pairs in self.manager.take_swaps())
        return [*outs, "|", *ins]


def _text(value: Any) -> str:
    if isinstance(value, list):
        parts = [f"({_text(item)})" if isinstance(item, list) else str(item) for item in value]
        return " ".join(parts)
    return str(value)
