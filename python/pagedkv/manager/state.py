"""The one state that the modules above share: settings, pool, index, moves, sequences and counters."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import (
    DuplicateSequenceError,
    InvalidArgumentError,
    NonCausalError,
    UnknownSequenceError,
    boolean,
    integer,
    refused,
)
from pagedkv.manager.blocks import MAX_BLOCKS
from pagedkv.manager.groups import MAX_BLOCK_SIZE, GroupSpec, resolve_groups
from pagedkv.manager.hashing import ChainHasher, HashFn, tie, tied
from pagedkv.manager.moves import Moves
from pagedkv.manager.pool import BlockPool
from pagedkv.manager.sequence import NEVER, SequenceState

_HIT_RATE_WINDOW = 1000


@dataclass
class ManagerSettings:
    """The arguments of `KVCacheManager`, checked; those of the pool, the groups and the hash are checked there."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    partial_hits: bool
    sliding_window: int | None
    hash_fn: str | HashFn
    watermark: float
    num_host_blocks: int
    record_events: bool
    groups: Sequence[GroupSpec] | None
    causal: bool

    def __post_init__(self) -> None:
        self.block_size = integer("block_size", self.block_size, 1, maximum=MAX_BLOCK_SIZE)
        self.num_host_blocks = integer("num_host_blocks", self.num_host_blocks, 0, maximum=MAX_BLOCKS)
        for name in ("enable_prefix_caching", "partial_hits", "record_events", "causal"):
            boolean(name, getattr(self, name))
        if not isinstance(self.watermark, int | float) or not 0.0 <= self.watermark < 1.0:
            raise InvalidArgumentError(f"watermark: expected a fraction in [0, 1), got {self.watermark!r}")
        if self.sliding_window is not None:
            integer("sliding_window", self.sliding_window, 1)
        if self.groups is not None and self.sliding_window is not None:
            raise InvalidArgumentError("sliding_window: expected None with groups, which have windows of their own")
        if not self.causal and self.enable_prefix_caching:
            raise NonCausalError("enable_prefix_caching: expected False for attention that is not causal")
        if self.partial_hits and not self.enable_prefix_caching:
            raise InvalidArgumentError("partial_hits: expected False without prefix caching")

    @property
    def group_specs(self) -> Sequence[GroupSpec]:
        if self.groups is not None:
            return self.groups
        return [GroupSpec() if self.sliding_window is None else GroupSpec("sliding", self.sliding_window)]


class State:
    """What a manager is made of.

    Attributes:
        groups: of layers; one where the manager was given none.
        step: tokens by which hits grow: whole blocks in every group.
        num_running: sequences that hold blocks.
        recent_hits: (tokens, cached ones) of the last admissions.
    """

    def __init__(self, settings: ManagerSettings) -> None:
        self.groups, chunk, self.step = resolve_groups(settings.group_specs, settings.block_size)
        if settings.partial_hits and self.step != chunk:
            raise InvalidArgumentError("partial_hits: expected groups of one block size")
        self.block_size = settings.block_size
        self.prefix_caching = settings.enable_prefix_caching
        self.causal = settings.causal
        self.pool = BlockPool(settings.num_blocks, record_events=settings.record_events)
        self.index = self.pool.index
        self.index.keeps_children = self.partial_hits = settings.partial_hits
        self.hasher = ChainHasher(settings.hash_fn, chunk)
        self.moves = Moves(self.pool, settings.num_host_blocks)
        self.sequences: dict[Hashable, SequenceState] = {}
        # less than a millionth over a whole number of blocks is rounding of the fraction
        self.watermark_blocks = math.ceil(settings.watermark * self.pool.num_usable - 1e-6)
        self.num_running = self.num_preemptions = self.num_swaps = 0
        self.recent_hits: deque[tuple[int, int]] = deque(maxlen=_HIT_RATE_WINDOW)

    def __getstate__(self) -> dict[str, Any]:
        tips = (seq.tip for seq in self.sequences.values())
        return {**self.__dict__, "links": tied([*self.index.contents, *tips])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tie(state.pop("links"))
        self.__dict__.update(state)

    def get(self, seq_id: Hashable) -> SequenceState:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise UnknownSequenceError(f"sequence {seq_id!r} is unknown: never added, or freed") from None
        except TypeError:
            raise refused("seq_id", "a hashable id", seq_id) from None

    def get_all(self, seq_ids: Sequence[Hashable]) -> list[SequenceState]:
        """The sequences of distinct ids."""
        sequences = self.sequences
        try:
            if isinstance(seq_ids, str):  # its letters may be ids
                raise TypeError
            seqs = [sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise UnknownSequenceError(f"sequence {error.args[0]!r} is unknown: never added, or freed") from None
        except TypeError:
            raise refused("seq_ids", "a sequence of hashable ids", seq_ids) from None
        if len(set(seq_ids)) != len(seqs):
            raise DuplicateSequenceError(f"seq_ids: an id is named twice in {seq_ids!r}")
        return seqs

    def check_new(self, seq_id: Hashable) -> None:
        try:
            exists = seq_id in self.sequences
        except TypeError:
            raise refused("seq_id", "a hashable id", seq_id) from None
        if exists:
            raise DuplicateSequenceError(f"sequence {seq_id!r} exists")

    def drop(self, blocks: Any) -> None:
        """Give blocks (an array, of numpy too) back, the last to be reused first.

        Moves into those that nobody holds then are not made.
        """
        self.pool.release(blocks)
        if self.moves:
            for block in blocks.tolist():
                if self.pool.refs[block] == 0:
                    self.moves.drop(block)

    def drop_tables(self, tables: Sequence[array[int]], released: Sequence[int]) -> None:
        """Give back what tables hold behind their null blocks; the tail, over all groups, is reused first."""
        np = self.pool.np
        blocks: Any
        if len(tables) == 1:
            blocks = tables[0][released[0] :]
        elif np:
            held = [np.frombuffer(table, np.int64)[first:] for table, first in zip(tables, released, strict=True)]
            distances = [np.arange(len(t), 0, -1) * g.block_size for t, g in zip(held, self.groups, strict=True)]
            blocks = np.concatenate(held)[np.argsort(-np.concatenate(distances), kind="stable")]
        else:
            keyed = []
            for number, group in enumerate(self.groups):
                part = tables[number][released[number] :]
                keyed += [(at * group.block_size, number, part[at]) for at in range(-len(part), 0)]
            blocks = array("q", [block for _, _, block in sorted(keyed)])
        if len(blocks):
            self.drop(blocks)

    def drop_host(self, seq: SequenceState) -> None:
        """Give back the host blocks of a sequence."""
        for hosts in seq.host or ():
            self.moves.drop_hosts(hosts)
        seq.host = None

    def note_limits(self, seq: SequenceState, *, writable: bool) -> None:
        """Settle fast_end (0 unless the written blocks are known to be the sequence's own) and publish_at."""
        fast_end = NEVER
        for group, table, released in zip(self.groups, seq.tables, seq.released, strict=True):
            fast_end = min(fast_end, len(table) * group.block_size, group.next_release(released))
        seq.fast_end = fast_end if writable else 0
        if self.prefix_caching:
            seq.publish_at = (seq.published // self.hasher.chunk + 1) * self.hasher.chunk
