"""KVCacheManager: sequences of tokens on reference-counted blocks. Integers and token ids only; no torch."""

from __future__ import annotations

import math
import operator
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.block_pool import BlockPool
from pagedkv.errors import (
    CommitError,
    DuplicateSequenceError,
    InvalidArgumentError,
    NonCausalError,
    PendingCopyError,
    ReleasedPositionError,
    TruncationError,
    UnknownSequenceError,
)
from pagedkv.explain import PrefixExplanation, explain_prefix
from pagedkv.groups import GroupSpec, resolve_groups
from pagedkv.integrity import check_manager
from pagedkv.lookup import Hit, PrefixLookup
from pagedkv.planning import Plan, make_plan
from pagedkv.prefix import (
    NO_KEYS,
    TOKEN_BYTES,
    ChainHasher,
    ExtraKeys,
    HashFn,
    KeySet,
    pack_tokens,
    unpack_tokens,
)
from pagedkv.sequence import SequenceState
from pagedkv.stats import KVCacheStats, collect_stats
from pagedkv.transfers import Pairs, Transfers

SeqId = Hashable
_HIT_RATE_WINDOW = 1000


@dataclass(slots=True)
class Allocation:
    """What `allocate_slots` granted. With groups every list holds one list per group.

    num_cached_tokens: tokens attached by this call that need no computation: cached, or swapped in.
    block_ids: the whole table. new_block_ids: handed out by this call, copy destinations included.
    slots: block * block_size + offset for every new token, in order. lookahead_slots: the same for lookahead tokens.
    """

    num_cached_tokens: int
    block_ids: list[Any]
    new_block_ids: list[Any]
    slots: list[Any]
    lookahead_slots: list[Any]


class KVCacheManager:
    """Maps sequences to blocks of a `BlockPool` (`manager.pool`), sharing equal prefixes.

    A step: `append` what was sampled, `allocate_slots` (None: nothing was changed, preempt something), apply
    `take_swaps()` and `take_copies()` in the order swap-outs, copies, swap-ins, run the model on the granted slots, `commit`.

    Args:
        num_blocks: blocks of the pool, the null block 0 included.
        block_size: tokens per block.
        enable_prefix_caching: publish full blocks and attach cached prefixes.
        partial_hits: attach a cached block too when only its first tokens agree (groups need one block size).
        sliding_window: tokens a token sees, itself included; blocks out of sight are given back.
        hash_fn: "sha256", or a callable from bytes to bytes.
        watermark: fraction of the usable blocks kept free at a sequence's first allocation.
        num_host_blocks: blocks of the host pool that `preempt(mode="swap")` moves to.
        record_events: keep tuples for `take_events`.
        groups: a GroupSpec per attention group; results are then lists in group order. Not with `sliding_window`.
        causal: False refuses prefix caching and prefills in more than one part.

    Raises:
        InvalidArgumentError, NonCausalError: a setting out of its range, or settings that exclude one another.

    Methods raise before they change anything: `UnknownSequenceError` for an id that was never added or is freed, and what
    each names.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        partial_hits: bool = False,
        sliding_window: int | None = None,
        hash_fn: str | HashFn = "sha256",
        watermark: float = 0.0,
        num_host_blocks: int = 0,
        record_events: bool = False,
        groups: Sequence[GroupSpec] | None = None,
        causal: bool = True,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: expected at least 1, got {block_size}")
        if not 0.0 <= watermark < 1.0:
            raise InvalidArgumentError(f"watermark: expected a fraction in [0, 1), got {watermark}")
        if num_host_blocks < 0:
            raise InvalidArgumentError(f"num_host_blocks: expected at least 0, got {num_host_blocks}")
        if groups is not None and sliding_window is not None:
            raise InvalidArgumentError("sliding_window: expected None with groups, which have windows of their own")
        if not causal and enable_prefix_caching:
            raise NonCausalError("enable_prefix_caching: expected False for attention that is not causal")
        if partial_hits and not enable_prefix_caching:
            raise InvalidArgumentError("partial_hits: expected False without prefix caching")
        alone = GroupSpec() if sliding_window is None else GroupSpec("sliding", sliding_window)
        self.groups, chunk, step = resolve_groups([alone] if groups is None else list(groups), block_size)
        if partial_hits and step != chunk:
            raise InvalidArgumentError("partial_hits: expected groups of one block size")
        self.block_size = block_size
        self.grouped = groups is not None
        self.prefix_caching = enable_prefix_caching
        self.causal = causal
        self.pool = BlockPool(num_blocks, record_events=record_events)
        self.hasher = ChainHasher(hash_fn, chunk)
        self.lookup = PrefixLookup(self.pool, self.groups, self.hasher, step, partial_hits=partial_hits)
        self.transfers = Transfers(self.pool, num_host_blocks)
        self.sequences: dict[SeqId, SequenceState] = {}
        self.watermark_blocks = math.ceil(watermark * self.pool.num_usable)
        self.num_running = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.recent_hits: deque[tuple[int, int]] = deque(maxlen=_HIT_RATE_WINDOW)

    # Sequences.

    def match_prefix(self, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> int:
        """How many leading tokens are cached now, at most all but the last; no side effects."""
        tokens = pack_tokens(token_ids)
        keys = _keys(extra_keys, cache_salt)
        if not self.prefix_caching or isinstance(tokens, int):
            return 0
        hit = self.lookup.find([], tokens, keys, len(tokens) // TOKEN_BYTES - 1)
        return hit.num_tokens + hit.tail_tokens

    def add(self, seq_id: SeqId, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> None:
        """Registers a sequence; allocates nothing. token_ids: ids, or a count where they are unknown.

        Raises:
            DuplicateSequenceError: the id is in use.
        """
        if seq_id in self.sequences:
            raise DuplicateSequenceError(f"sequence {seq_id!r} exists")
        tokens = pack_tokens(token_ids)
        known = b"" if isinstance(tokens, int) else tokens
        count = tokens if isinstance(tokens, int) else len(tokens) // TOKEN_BYTES
        keys = _keys(extra_keys, cache_salt)
        self.sequences[seq_id] = SequenceState(seq_id, keys, bytearray(known), count, len(self.groups))

    def append(self, seq_id: SeqId, token_ids: Any) -> None:
        """Adds tokens that exist now (sampled), as ids or as a count."""
        seq = self._get(seq_id)
        tokens = pack_tokens(token_ids)
        if isinstance(tokens, int):
            seq.num_tokens += tokens
            return
        if len(seq.tokens) == seq.num_tokens * TOKEN_BYTES:
            seq.tokens += tokens
        seq.num_tokens += len(tokens) // TOKEN_BYTES

    def free(self, seq_id: SeqId) -> None:
        """Forgets a sequence; its blocks keep their hashes until they are reused."""
        seq = self._get(seq_id)
        del self.sequences[seq_id]
        self._give_back(seq)

    def block_ids(self, seq_id: SeqId) -> list[Any]:
        """The block table; 0 where a window has passed. With groups one list per group."""
        return self._shaped([table.tolist() for table in self._get(seq_id).tables])

    def num_computed_tokens(self, seq_id: SeqId) -> int:
        """Tokens whose KV is held: committed ones, on the host too while the sequence is swapped out."""
        return self._get(seq_id).num_computed

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens that exist."""
        return self._get(seq_id).num_tokens

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    # Slots.

    def allocate_slots(
        self,
        seq_id: SeqId,
        num_new_tokens: int | None = None,
        *,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> Allocation | None:
        """Makes sure that the next tokens have slots; None, and nothing changes, when blocks are missing.

        The first call, and the first after `preempt`, attaches the cached prefix. Blocks out of a window's sight are given
        back first.

        Args:
            num_new_tokens: tokens after the computed and the external ones; None: all that remain, more is cut to that.
            num_external_tokens: tokens after the cached prefix whose KV comes from elsewhere: they get blocks, no slots.
            num_lookahead_tokens: slots for drafts behind the new tokens.

        Raises:
            InvalidArgumentError: a negative count, or more external tokens than remain.
            NonCausalError: attention is not causal and not all that remains is asked for.
        """
        seq = self._get(seq_id)
        new = None if num_new_tokens is None else _count("num_new_tokens", num_new_tokens)
        external = _count("num_external_tokens", num_external_tokens)
        lookahead = _count("num_lookahead_tokens", num_lookahead_tokens)
        if seq.running:
            plan = make_plan(self, seq, seq.num_computed, seq.tables, new, external, lookahead)
            return None if plan is None else self._apply(seq, plan, 0)
        return self._admit(seq, new, external, lookahead)

    def _admit(self, seq: SequenceState, new: int | None, external: int, lookahead: int) -> Allocation | None:
        if seq.host is not None:
            cached = seq.num_computed
            plan = make_plan(self, seq, cached, self._swapped_tables(seq), new, external, lookahead)
        else:
            hit = self._find(seq)
            cached = hit.num_tokens + hit.tail_tokens
            tables = hit.tables
            if hit.tail_tokens:
                tables = [table + array("q", [tail]) for table, tail in zip(tables, hit.tail_blocks, strict=True)]
            plan = make_plan(self, seq, cached, tables, new, external, lookahead)
            if plan is None and hit.tail_tokens:
                cached = hit.num_tokens
                plan = make_plan(self, seq, cached, hit.tables, new, external, lookahead)
        if plan is None:
            return None
        if seq.host is None and self.prefix_caching:
            self.recent_hits.append((seq.num_tokens, cached))
        allocation = self._apply(seq, plan, cached)
        seq.num_hit = cached
        return allocation

    def _find(self, seq: SequenceState) -> Hit:
        if not self.prefix_caching:
            return Hit(0, [array("q") for _ in self.groups])
        return self.lookup.find(seq.chain, seq.tokens, seq.keys, min(seq.num_known, seq.num_tokens - 1))

    def _swapped_tables(self, seq: SequenceState) -> list[array[int]]:
        """Tables of a swapped sequence: cached blocks where the pool still has them, -1 where the host block is needed."""
        assert seq.host is not None
        tables = []
        for number, (group, hosts) in enumerate(zip(self.groups, seq.host, strict=True)):
            full = min(seq.num_computed, seq.num_known) // group.block_size if self.prefix_caching else 0
            self.hasher.extend(seq.chain, seq.tokens, seq.keys, full * group.chunks_per_block)
            table = array("q")
            for block, host in enumerate(hosts):
                found = self.lookup.block_at(number, seq.chain, block) if block < full and host >= 0 else 0
                table.append(found or (0 if host < 0 else -1))
            tables.append(table)
        return tables

    def _apply(self, seq: SequenceState, plan: Plan, cached: int) -> Allocation:
        pool, transfers = self.pool, self.transfers
        if seq.running:
            self._release_windows(seq, plan.released)
        else:
            for table in plan.tables:
                pool.acquire(block for block in table if block > 0)
            seq.tables = [table[:] for table in plan.tables]
            seq.attached = plan.attached
            seq.released = plan.released
            if seq.host is None:
                seq.published = [plan.computed // group.block_size for group in self.groups]
            seq.running = True
            self.num_running += 1
        new_blocks = []
        for number, table in enumerate(seq.tables):
            fresh = pool.get_new_blocks(plan.num_new_blocks[number])
            new_blocks.append(fresh)
            used = 0
            written = plan.written[number]
            if written >= 0:
                source = table[written]
                if plan.copies[number]:
                    table[written] = fresh[0]
                    used = 1
                    transfers.copy(source, fresh[0])
                    self._drop_blocks([source])
                    seq.attached[number] = min(seq.attached[number], written)
                else:
                    pool.unpublish(source)
            if seq.host is not None:
                for block, host in enumerate(seq.host[number]):
                    if table[block] < 0:
                        table[block] = fresh[used]
                        transfers.swap_in(host, fresh[used])
                        used += 1
            table.extend(fresh[used:])
        self._drop_host(seq)
        seq.num_computed = plan.computed
        seq.num_granted = max(seq.num_granted, plan.end)
        for number, written in enumerate(plan.written):
            if written >= 0:
                seq.published[number] = min(seq.published[number], written)
        return Allocation(
            cached,
            self._shaped([table.tolist() for table in seq.tables]),
            self._shaped(new_blocks),
            self._slots(seq, plan.start, plan.stop),
            self._slots(seq, plan.stop, plan.end),
        )

    def _slots(self, seq: SequenceState, start: int, stop: int) -> list[Any]:
        return self._shaped(
            [_slots(table, group.block_size, start, stop) for table, group in zip(seq.tables, self.groups, strict=True)]
        )

    def _shaped(self, per_group: list[list[int]]) -> list[Any]:
        return per_group if self.grouped else per_group[0]

    def _release_windows(self, seq: SequenceState, released: list[int]) -> None:
        dropped = []
        for number, table in enumerate(seq.tables):
            for block in range(released[number] - 1, seq.released[number] - 1, -1):
                dropped.append(table[block])
                table[block] = 0
        seq.released = released
        if dropped:
            self._drop_blocks(dropped)

    # Written tokens.

    def commit(self, seq_id: SeqId, num_tokens: int) -> None:
        """So many more tokens have their KV written; blocks that they fill are published.

        Raises:
            CommitError: past the existing tokens, or past the granted slots.
            PendingCopyError: a block of theirs still waits for a copy or a swap-in that was not taken.
        """
        seq = self._get(seq_id)
        computed = seq.num_computed + _count("num_tokens", num_tokens)
        if computed > seq.num_tokens or computed > seq.num_granted:
            raise CommitError(
                f"num_tokens: sequence {seq_id!r} has {seq.num_computed} of {seq.num_tokens} tokens committed and slots "
                f"for {seq.num_granted}, got {num_tokens} more"
            )
        if self.transfers and num_tokens:
            self._check_arrived(seq, computed)
        seq.num_computed = computed
        if self.prefix_caching:
            self._publish(seq)

    def _check_arrived(self, seq: SequenceState, computed: int) -> None:
        for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            for block in table[seq.published[number] : -(-computed // group.block_size)]:
                if self.transfers.is_pending(block):
                    raise PendingCopyError(
                        f"block {block} of sequence {seq.seq_id!r} waits for take_copies or take_swaps"
                    )

    def _publish(self, seq: SequenceState) -> None:
        pool = self.pool
        known = min(seq.num_computed, seq.num_known)
        for number, group in enumerate(self.groups):
            full = known // group.block_size
            first = seq.published[number]
            if full <= first:
                continue
            per_block = group.chunks_per_block
            self.hasher.extend(seq.chain, seq.tokens, seq.keys, full * per_block)
            seq.published[number] = full
            suffix = self.lookup.suffixes[number]
            table = seq.tables[number]
            for index in range(first, full):
                block = table[index]
                if block and not pool.is_published(block):
                    link = seq.chain[(index + 1) * per_block - 1]
                    before = seq.chain[index * per_block - 1].hash + suffix if index else None
                    pool.publish(
                        block, link.hash + suffix, link, parent=before, tokens=self._tokens_of(seq, number, index)
                    )
                    self.lookup.add_child(number, block, link)

    def _tokens_of(self, seq: SequenceState, number: int, block: int) -> Sequence[int]:
        if self.pool.events is None:
            return ()
        width = self.groups[number].block_size * TOKEN_BYTES
        return unpack_tokens(seq.tokens[block * width : (block + 1) * width])

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cuts a sequence to `num_tokens`, a length, and drops its lookahead slots.

        Raises:
            TruncationError: longer than the sequence, or negative.
            ReleasedPositionError: the next token would see positions that a window has given back.
        """
        seq = self._get(seq_id)
        length = operator.index(num_tokens)
        if not 0 <= length <= seq.num_tokens:
            raise TruncationError(f"num_tokens: expected 0..{seq.num_tokens} for sequence {seq_id!r}, got {num_tokens}")
        computed = min(length, seq.num_computed)
        for number, group in enumerate(self.groups):
            released = seq.released[number] if seq.host is None else _leading(seq.host[number], -1)
            lost = min(computed, released * group.block_size)
            if computed and (
                group.first_visible(computed) < lost
                or (computed % group.block_size and computed // group.block_size < released)
            ):
                raise ReleasedPositionError(
                    f"num_tokens: after {length} tokens the next one sees positions below {lost}, which were given back"
                )
        seq.cut(length, self.hasher.chunk)
        dropped = []
        for number, group in enumerate(self.groups):
            keep = -(-length // group.block_size)
            for counts in (seq.attached, seq.released):
                counts[number] = min(counts[number], keep)
            seq.published[number] = min(seq.published[number], length // group.block_size)
            dropped.append(seq.tables[number][keep:])
            del seq.tables[number][keep:]
            if seq.host is not None:
                held = -(-seq.num_computed // group.block_size)
                for host in seq.host[number][held:]:
                    if host >= 0:
                        self.transfers.drop_host(host)
                del seq.host[number][held:]
        self._drop_tables(dropped)

    # Sharing.

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """A child with the parent's committed tokens, on the same blocks.

        Raises:
            DuplicateSequenceError: the child's id is in use.
        """
        parent = self._get(parent_id)
        if child_id in self.sequences:
            raise DuplicateSequenceError(f"sequence {child_id!r} exists")
        self.sequences[child_id] = self._share(parent, child_id)

    def reorder(self, seq_ids: Sequence[SeqId], parents: Sequence[int]) -> None:
        """Beam search: sequence i goes on from the committed tokens of what seq_ids[parents[i]] is now.

        Raises:
            DuplicateSequenceError: an id is named twice.
            InvalidArgumentError: another number of parents than ids, or an index out of range.
        """
        seq_ids = list(seq_ids)
        indices = [operator.index(parent) for parent in parents]
        old = [self._get(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(seq_ids):
            raise DuplicateSequenceError(f"seq_ids: an id is named twice in {seq_ids!r}")
        if len(indices) != len(old) or any(not 0 <= index < len(old) for index in indices):
            raise InvalidArgumentError(f"parents: expected {len(old)} indices into seq_ids, got {indices!r}")
        shared = [self._share(old[index], seq_id) for seq_id, index in zip(seq_ids, indices, strict=True)]
        for seq in old:
            self._give_back(seq)
        self.sequences.update(zip(seq_ids, shared, strict=True))

    def _share(self, parent: SequenceState, child_id: SeqId) -> SequenceState:
        length = parent.num_computed
        tokens = parent.tokens[: length * TOKEN_BYTES]
        child = SequenceState(child_id, parent.keys, tokens, length, len(self.groups), num_computed=length)
        child.chain = parent.chain[: length // self.hasher.chunk]
        child.num_hit = min(parent.num_hit, length)
        if parent.host is not None:
            child.host = [list(hosts) for hosts in parent.host]
            for hosts in child.host:
                for host in hosts:
                    if host >= 0:
                        self.transfers.host.acquire(host)
        elif length:
            child.running = True
            self.num_running += 1
            child.num_granted = length
            for number, group in enumerate(self.groups):
                keep = -(-length // group.block_size)
                child.tables[number] = parent.tables[number][:keep]
                child.published[number] = min(parent.published[number], length // group.block_size)
                child.attached[number] = min(parent.attached[number], keep)
                child.released[number] = parent.released[number]
                self.pool.acquire(child.tables[number])
        return child

    # Giving back.

    def preempt(self, seq_id: SeqId, mode: str = "recompute") -> str:
        """Takes a sequence's blocks and keeps its tokens; the next `allocate_slots` attaches what is cached, or swaps in.

        mode: "recompute", or "swap": its KV goes to the host pool; where that is full, it is dropped as with "recompute".
        Returns what was done.

        Raises:
            InvalidArgumentError: another mode.
        """
        seq = self._get(seq_id)
        if mode not in ("recompute", "swap"):
            raise InvalidArgumentError(f'mode: expected "recompute" or "swap", got {mode!r}')
        if not seq.running:
            if seq.host is not None and mode == "swap":
                return "swap"
            self._drop_host(seq)
            seq.num_computed = 0
            return "recompute"
        self.num_preemptions += 1
        host = self._swap_out(seq) if mode == "swap" else None
        self._give_back(seq)
        seq.detach()
        seq.host = host
        if host is None:
            seq.num_computed = 0
            return "recompute"
        self.num_swaps += 1
        return "swap"

    def _swap_out(self, seq: SequenceState) -> list[list[int]] | None:
        held = [
            table[: -(-seq.num_computed // group.block_size)]
            for table, group in zip(seq.tables, self.groups, strict=True)
        ]
        blocks = [block for table in held for block in table if block]
        if not blocks or self.transfers.num_host_needed(blocks) > len(self.transfers.host.free):
            return None
        return [[self.transfers.swap_out(block) if block else -1 for block in table] for table in held]

    def _give_back(self, seq: SequenceState) -> None:
        """Drops a sequence's references to device and host blocks."""
        self._drop_tables(seq.tables)
        self._drop_host(seq)
        if seq.running:
            self.num_running -= 1

    def _drop_host(self, seq: SequenceState) -> None:
        if seq.host is not None:
            for hosts in seq.host:
                for host in hosts:
                    if host >= 0:
                        self.transfers.drop_host(host)
            seq.host = None

    def _drop_tables(self, tables: Sequence[array[int]]) -> None:
        """Gives back what tables hold, the positions nearest the end first, across groups."""
        if len(tables) == 1:
            blocks = np.frombuffer(tables[0], np.int64)[::-1]
        else:
            # every table ends at the same position
            ends = [
                np.arange(len(table), 0, -1) * group.block_size - len(table) * group.block_size
                for table, group in zip(tables, self.groups, strict=True)
            ]
            order = np.argsort(-np.concatenate(ends), kind="stable")
            blocks = np.concatenate([np.frombuffer(table, np.int64)[::-1] for table in tables])[order]
        self._drop_blocks(blocks[blocks > 0].tolist())

    def _drop_blocks(self, blocks: list[int]) -> None:
        self.pool.release(np.array(blocks, np.int64))
        if self.transfers:
            for block in blocks:
                if self.pool.refs[block] == 0:
                    self.transfers.drop(block)

    # Moves, cache, accounts.

    def take_copies(self) -> Pairs:
        """Pending (source, destination) copies, now the caller's: to be applied after swap-outs, before swap-ins."""
        return self.transfers.take_copies()

    def take_swaps(self) -> tuple[Pairs, Pairs]:
        """Pending (device, host) swap-outs and (host, device) swap-ins, now the caller's."""
        return self.transfers.take_swaps()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing changes, while any block is referenced or pinned."""
        if not self.pool.reset():
            return False
        self.lookup.reset()
        return True

    def take_events(self) -> list[tuple[Any, ...]]:
        """("stored", hash, parent, tokens), ("removed", hash), ("cleared",) since the last call, in order."""
        events = self.pool.events
        if not events:
            return []
        self.pool.events = []
        return events

    def stats(self, bytes_per_block: int | None = None) -> KVCacheStats:
        """Counters and what the used blocks hold now; bytes where the size of a block over all layers is given."""
        return collect_stats(self, bytes_per_block)

    def explain(self, seq_id: SeqId) -> PrefixExplanation:
        """Why the sequence's prefix was not served from the cache any further than it was."""
        return explain_prefix(self, self._get(seq_id))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, references, pins, tables and the index agree."""
        check_manager(self)

    def _get(self, seq_id: SeqId) -> SequenceState:
        seq = self.sequences.get(seq_id)
        if seq is None:
            raise UnknownSequenceError(f"sequence {seq_id!r} is unknown: never added, or freed")
        return seq


def _keys(extra_keys: ExtraKeys, cache_salt: Any) -> KeySet:
    return KeySet(extra_keys, cache_salt) if extra_keys or cache_salt is not None else NO_KEYS


def _count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidArgumentError(f"{name}: expected an int of at least 0, got {value!r}")
    return count


def _leading(blocks: Sequence[int], value: int) -> int:
    """How many entries at the start equal `value`."""
    return next((index for index, block in enumerate(blocks) if block != value), len(blocks))


def _slots(table: array[int], block_size: int, start: int, stop: int) -> list[int]:
    slots: list[int] = []
    while start < stop:
        block, offset = divmod(start, block_size)
        count = min(stop - start, block_size - offset)
        first = table[block] * block_size + offset
        slots.extend(range(first, first + count))
        start += count
    return slots
