"""What the manager knows about one sequence."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from pagedkv.manager.hashing import KeySet, Link, chain_of
from pagedkv.manager.tokens import TokenIds

NEVER = sys.maxsize
Counts = tuple[int, ...]


def lowered(counts: Counts, number: int, limit: int) -> Counts:
    """Counts with the entry of one group cut to a limit."""
    return counts if counts[number] <= limit else (*counts[:number], limit, *counts[number + 1 :])


@dataclass(slots=True)
class SequenceState:
    """Lists and tuples have one entry per attention group; counts are tokens unless a name says blocks.

    tokens: ids, fewer than num_tokens where they are unknown or nobody needs them; all_known: none is missing.
    tip: the link of the last of num_links chunks hashed.
    num_granted: slots exist for the positions below. running: attached, and not preempted since.
    published: full blocks below were offered to the prefix index. attached, released: leading blocks of each table that
    were taken from the index, that were given back.
    host: host block ids of a swapped sequence, -1 where its table has the null block.
    num_hit: tokens that came from the prefix cache at the last admission.
    fast_end: tokens at positions below can be written without a look at any block: those blocks are this sequence's
    own and unpublished, and no window gives anything back before. publish_at: computed tokens that fill a next chunk.
    awaited: (group, table index) of blocks whose content a copy or a swap had to bring, until a commit saw it come.
    """

    seq_id: Hashable
    keys: KeySet
    num_groups: int
    tokens: TokenIds = field(default_factory=TokenIds)
    num_tokens: int = 0
    all_known: bool = True
    num_computed: int = 0
    num_granted: int = 0
    num_hit: int = 0
    running: bool = False
    tip: Link | None = None
    num_links: int = 0
    tables: list[array[int]] = field(init=False)
    published: int = 0
    attached: Counts = field(init=False)
    released: Counts = field(init=False)
    host: list[list[int]] | None = None
    fast_end: int = 0
    publish_at: int = NEVER
    awaited: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.detach()

    def detach(self) -> None:
        """Forget the blocks, which the caller has given back."""
        self.tables = [array("q") for _ in range(self.num_groups)]
        self.attached = self.released = (0,) * self.num_groups
        self.published = 0
        self.num_granted = self.fast_end = 0
        self.publish_at = NEVER
        self.running = False
        self.awaited = []

    def extend(self, tokens: array[int] | int) -> None:
        """Add tokens by id, or by count; ids behind unknown ones stay unknown."""
        if isinstance(tokens, int):
            self.num_tokens += tokens
            self.all_known = self.all_known and not tokens
            return
        if self.all_known:
            self.tokens.tail.extend(tokens)
        self.num_tokens += len(tokens)

    def cut(self, num_tokens: int, chunk: int) -> None:
        """Forget the tokens past `num_tokens`; tables are the caller's."""
        self.tokens.cut(num_tokens)
        self.all_known = len(self.tokens) == num_tokens
        self.cut_links(num_tokens // chunk)
        self.num_tokens = num_tokens
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_granted = min(self.num_granted, num_tokens)
        self.fast_end = 0

    def links(self, first: int = 0) -> list[Link]:
        """The links of chunks [first, num_links)."""
        return chain_of(self.tip, self.num_links - first)

    def cut_links(self, num_links: int) -> None:
        while self.num_links > num_links:
            assert self.tip is not None
            self.tip = self.tip.parent
            self.num_links -= 1
