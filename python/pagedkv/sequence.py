"""What the manager knows about one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from pagedkv.prefix import TOKEN_BYTES, KeySet, Link


@dataclass(slots=True)
class SequenceState:
    """Lists with one entry per attention group; counts of tokens unless a name says blocks.

    tokens: packed ids, shorter than num_tokens where ids are unknown. chain: links of the full chunks hashed so far.
    num_granted: slots exist for the positions below. running: attached, and not preempted since.
    published, attached, released: leading blocks that were offered to the prefix index, came from it, were given back.
    host: host block ids of a swapped sequence, -1 where its table has the null block.
    """

    seq_id: Hashable
    keys: KeySet
    tokens: bytearray
    num_tokens: int
    num_groups: int
    num_computed: int = 0
    num_granted: int = 0
    num_hit: int = 0
    running: bool = False
    chain: list[Link] = field(default_factory=list)
    tables: list[array[int]] = field(init=False)
    published: list[int] = field(init=False)
    attached: list[int] = field(init=False)
    released: list[int] = field(init=False)
    host: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self.detach()

    def detach(self) -> None:
        """Forgets the blocks, which the caller has given back."""
        self.tables = [array("q") for _ in range(self.num_groups)]
        self.published = [0] * self.num_groups
        self.attached = [0] * self.num_groups
        self.released = [0] * self.num_groups
        self.num_granted = 0
        self.running = False

    @property
    def num_known(self) -> int:
        """Leading tokens whose ids are known."""
        return len(self.tokens) // TOKEN_BYTES

    def cut(self, num_tokens: int, chunk: int) -> None:
        """Forgets the tokens past `num_tokens`; tables are the caller's."""
        del self.tokens[num_tokens * TOKEN_BYTES :]
        del self.chain[num_tokens // chunk :]
        self.num_tokens = num_tokens
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_granted = min(self.num_granted, num_tokens)
