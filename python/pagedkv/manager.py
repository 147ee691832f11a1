"""KVCacheManager: sequences of tokens on reference-counted blocks. Integers and token ids only; no torch."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from pagedkv.allocation import Allocation, Request, admit, allocate, allocate_next, note_limits
from pagedkv.block_pool import MAX_BLOCKS, BlockPool
from pagedkv.decode import DecodeStep, append_step, commit_step
from pagedkv.errors import (
    CommitError,
    DuplicateSequenceError,
    InvalidArgumentError,
    NonCausalError,
    ReleasedPositionError,
    TruncationError,
    UnknownSequenceError,
    boolean,
    integer,
    listed,
    refused,
)
from pagedkv.explain import PrefixExplanation, explain_prefix
from pagedkv.groups import MAX_BLOCK_SIZE, GroupSpec, resolve_groups
from pagedkv.integrity import check_manager
from pagedkv.lookup import PrefixLookup
from pagedkv.prefix import NO_KEYS, ChainHasher, ExtraKeys, HashFn, KeySet, tie, tied
from pagedkv.publishing import check_arrived, new_links, publish
from pagedkv.release import drop_host, drop_host_blocks, drop_tables, give_back, share, swap_out
from pagedkv.sequence import SequenceState, lowered
from pagedkv.stats import KVCacheStats, collect_stats
from pagedkv.token_ids import TokenIds, pack_tokens
from pagedkv.transfers import Pairs, Transfers

__all__ = ["Allocation", "DecodeStep", "GroupSpec", "KVCacheManager", "KVCacheStats", "PrefixExplanation"]

SeqId = Hashable
_HIT_RATE_WINDOW = 1000


class KVCacheManager:
    """Maps sequences to blocks of a `BlockPool` (`manager.pool`), sharing equal prefixes.

    A step: `append` what was sampled, `allocate_slots` (None: nothing was changed, preempt something), take and apply
    swap-outs, copies and swap-ins in this order, run the model on the granted slots, `commit`.

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

    Methods raise before they change anything: `UnknownSequenceError` for an id that was never added or is freed,
    `InvalidArgumentError` for values and types that are not accepted, and what each one names.
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
        block_size = integer("block_size", block_size, 1, maximum=MAX_BLOCK_SIZE)
        num_host_blocks = integer("num_host_blocks", num_host_blocks, 0, maximum=MAX_BLOCKS)
        boolean("enable_prefix_caching", enable_prefix_caching)
        boolean("partial_hits", partial_hits)
        boolean("record_events", record_events)
        boolean("causal", causal)
        if not isinstance(watermark, int | float) or not 0.0 <= watermark < 1.0:
            raise InvalidArgumentError(f"watermark: expected a fraction in [0, 1), got {watermark!r}")
        if groups is not None and sliding_window is not None:
            raise InvalidArgumentError("sliding_window: expected None with groups, which have windows of their own")
        if not causal and enable_prefix_caching:
            raise NonCausalError("enable_prefix_caching: expected False for attention that is not causal")
        if partial_hits and not enable_prefix_caching:
            raise InvalidArgumentError("partial_hits: expected False without prefix caching")
        alone = GroupSpec() if sliding_window is None else GroupSpec("sliding", sliding_window)
        self.groups, chunk, step = resolve_groups([alone] if groups is None else groups, block_size)
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
        # less than a millionth over a whole number of blocks is rounding of the fraction
        self.watermark_blocks = math.ceil(watermark * self.pool.num_usable - 1e-6)
        self.num_running = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.recent_hits: deque[tuple[int, int]] = deque(maxlen=_HIT_RATE_WINDOW)

    def __getstate__(self) -> dict[str, Any]:
        tips = (seq.tip for seq in self.sequences.values())
        return {**self.__dict__, "links": tied([*self.pool.contents, *tips])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tie(state.pop("links"))
        self.__dict__.update(state)

    def __copy__(self) -> KVCacheManager:
        raise TypeError("a KVCacheManager can not be copied and share its blocks: copy.deepcopy gives one of its own")

    def __repr__(self) -> str:
        used = (
            f"{self.pool.num_usable - self.pool.num_free} of {self.pool.num_usable} blocks of {self.block_size} tokens"
        )
        groups = f", {len(self.groups)} groups" if self.grouped else ""
        return f"KVCacheManager({used} used, {len(self.sequences)} sequences, {self.num_running} running{groups})"

    # Sequences and their tokens.

    def match_prefix(self, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> int:
        """How many leading tokens are cached now, at most all but the last; no side effects."""
        tokens = pack_tokens(token_ids)
        keys = _keys(extra_keys, cache_salt)
        if not self.prefix_caching or isinstance(tokens, int):
            return 0
        hit = self.lookup.find([], TokenIds(tokens), keys, len(tokens) - 1)
        return hit.num_tokens + hit.tail_tokens

    def add(self, seq_id: SeqId, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> None:
        """Registers a sequence; allocates nothing.

        Args:
            token_ids: ids (any sequence of ints of at least 0, an array or a tensor), or a count where they are
                unknown. None yet, [] or 0, is legal: `append` brings them.
            extra_keys: what else its KV depends on: (kind, value), or (kind, value, start, end) for a range of
                positions. Only sequences with equal keys share blocks; values are plain ones.
            cache_salt: sequences share nothing with those of another salt.

        Raises:
            DuplicateSequenceError: the id is in use.
        """
        self._check_new(seq_id)
        tokens = pack_tokens(token_ids)
        seq = SequenceState(seq_id, _keys(extra_keys, cache_salt), len(self.groups))
        seq.extend(self._needed(tokens))
        self.sequences[seq_id] = seq

    def append(self, seq_id: SeqId, token_ids: Any) -> None:
        """Adds tokens that exist now (sampled), as ids or as a count."""
        self._get(seq_id).extend(self._needed(pack_tokens(token_ids)))

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cuts a sequence to `num_tokens`, a length, and drops its lookahead slots.

        Raises:
            TruncationError: longer than the sequence, or negative.
            ReleasedPositionError: the next token would see positions that a window has given back.
        """
        seq = self._get(seq_id)
        length = integer("num_tokens", num_tokens)
        if not 0 <= length <= seq.num_tokens:
            raise TruncationError(f"num_tokens: expected 0..{seq.num_tokens} for sequence {seq_id!r}, got {length}")
        self._check_in_sight(seq, length)
        seq.cut(length, self.hasher.chunk)
        seq.published = min(seq.published, length)
        dropped, nulls = [], []
        for number, group in enumerate(self.groups):
            keep = -(-length // group.block_size)
            nulls.append(max(0, seq.released[number] - keep))
            seq.attached = lowered(seq.attached, number, keep)
            seq.released = lowered(seq.released, number, keep)
            dropped.append(seq.tables[number][keep:])
            del seq.tables[number][keep:]
            if seq.host is not None:
                held = -(-seq.num_computed // group.block_size)
                drop_host_blocks(self, seq.host[number][held:])
                del seq.host[number][held:]
        drop_tables(self, dropped, nulls)
        if seq.running:
            note_limits(self, seq, writable=False)

    def _check_in_sight(self, seq: SequenceState, length: int) -> None:
        computed = min(length, seq.num_computed)
        for number, group in enumerate(self.groups):
            released = seq.released[number] if seq.host is None else seq.host[number].count(-1)
            lost = min(computed, released * group.block_size)
            split = computed % group.block_size and computed // group.block_size < released
            if group.first_visible(computed) < lost or split:
                raise ReleasedPositionError(
                    f"num_tokens: after {length} tokens the next one sees positions below "
                    f"{released * group.block_size}, which were given back"
                )

    def free(self, seq_id: SeqId) -> None:
        """Forgets a sequence; its blocks keep their hashes until they are reused."""
        seq = self._get(seq_id)
        del self.sequences[seq_id]
        give_back(self, seq)

    def block_ids(self, seq_id: SeqId) -> list[Any]:
        """The block table; 0 where a window has passed. With groups one list per group."""
        tables = [table.tolist() for table in self._get(seq_id).tables]
        return tables if self.grouped else tables[0]

    def num_computed_tokens(self, seq_id: SeqId) -> int:
        """Tokens whose KV is held: committed ones, on the host too while the sequence is swapped out."""
        return self._get(seq_id).num_computed

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens that exist."""
        return self._get(seq_id).num_tokens

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones that nobody uses included."""
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

        The first call, and the first after `preempt`, attaches the cached prefix. Blocks out of a window's sight are
        given back first. A repeated call without a commit takes nothing more.

        Args:
            num_new_tokens: tokens after the computed and the external ones; None: all that remain, more is cut to them.
            num_external_tokens: tokens after the cached prefix whose KV comes from elsewhere: they get blocks, but are
                not among the slots, and count as computed once committed.
            num_lookahead_tokens: slots for drafts behind the new tokens.

        Raises:
            InvalidArgumentError: a negative count, or more external tokens than remain.
            NonCausalError: attention is not causal and not all that remains is asked for.
        """
        seq = self._get(seq_id)
        others = num_external_tokens or num_lookahead_tokens
        if num_new_tokens == 1 and not others and self.causal and seq.num_computed < min(seq.fast_end, seq.num_tokens):
            granted: Allocation | None = allocate_next(self, seq)
            return granted if self.grouped or granted is None else granted.of_one_group()
        request = Request(
            None if num_new_tokens is None else _count("num_new_tokens", num_new_tokens),
            _count("num_external_tokens", num_external_tokens),
            _count("num_lookahead_tokens", num_lookahead_tokens),
            seq.num_tokens,
        )
        granted = allocate(self, seq, request) if seq.running else admit(self, seq, request)
        return granted if self.grouped or granted is None else granted.of_one_group()

    def commit(self, seq_id: SeqId, num_tokens: int) -> None:
        """So many more tokens have their KV written; blocks that they fill are published.

        Raises:
            CommitError: past the existing tokens, or past the granted slots.
            PendingCopyError: a block of theirs still waits for a copy or a swap-in that was not taken.
        """
        seq = self._get(seq_id)
        computed = seq.num_computed + _count("num_tokens", num_tokens)
        if computed > seq.num_tokens or (computed > seq.num_granted and num_tokens):
            raise CommitError(
                f"num_tokens: sequence {seq_id!r} has {seq.num_computed} of {seq.num_tokens} tokens committed and "
                f"slots for {seq.num_granted}, got {num_tokens} more"
            )
        if seq.awaited and num_tokens:
            check_arrived(self, seq)
        if computed < seq.publish_at:
            seq.num_computed = computed
            return
        links = new_links(self, seq, computed)  # the caller's hash_fn may raise
        seq.num_computed = computed
        publish(self, seq, links)

    def append_step(self, seq_ids: Sequence[SeqId], token_ids: Any) -> DecodeStep | None:
        """One decode step in one call: a token appended to each sequence, and its slot allocated.

        For running sequences whose tokens are all committed. None, and nothing changes, when blocks are missing; a
        block that two of the sequences would have to copy is counted twice, so single calls may still succeed then.

        Raises:
            DuplicateSequenceError: an id is named twice.
            InvalidArgumentError: another number of tokens than ids; a sequence that is not running or has tokens left.
        """
        tokens = pack_tokens(token_ids)
        if isinstance(tokens, int):
            raise InvalidArgumentError(f"token_ids: expected one id per sequence, got the count {tokens}")
        return append_step(self, seq_ids, tokens)

    def commit_step(self, seq_ids: Sequence[SeqId]) -> None:
        """`commit(seq_id, 1)` for many sequences in one call; raises as it does, before anything changes."""
        commit_step(self, seq_ids)

    # Sharing and preemption.

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """A child with the parent's committed tokens, on the same blocks.

        Raises:
            DuplicateSequenceError: the child's id is in use.
        """
        parent = self._get(parent_id)
        self._check_new(child_id)
        self.sequences[child_id] = share(self, parent, child_id)

    def reorder(self, seq_ids: Sequence[SeqId], parents: Sequence[int]) -> None:
        """Beam search: sequence i goes on from the committed tokens of what seq_ids[parents[i]] is now.

        Raises:
            DuplicateSequenceError: an id is named twice.
            InvalidArgumentError: another number of parents than ids, or an index out of range.
        """
        indices = [_count("parents", parent) for parent in listed("parents", parents, "a sequence of indices")]
        seq_ids = listed("seq_ids", seq_ids, "a sequence of ids")
        old = [self._get(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(old):
            raise DuplicateSequenceError(f"seq_ids: an id is named twice in {seq_ids!r}")
        if len(indices) != len(old) or any(index >= len(old) for index in indices):
            raise InvalidArgumentError(f"parents: expected {len(old)} indices into seq_ids, got {indices!r}")
        shared = [share(self, old[index], seq_id) for seq_id, index in zip(seq_ids, indices, strict=True)]
        for seq in old:
            give_back(self, seq)
        self.sequences.update(zip(seq_ids, shared, strict=True))

    def preempt(self, seq_id: SeqId, mode: str = "recompute") -> str:
        """Takes a sequence's blocks, not its tokens; the next `allocate_slots` attaches what is cached, or swaps in.

        mode: "recompute"; or "swap": its KV goes to the host pool, unless that is too full: then as "recompute".
        Returns what was done.
        """
        seq = self._get(seq_id)
        if mode not in ("recompute", "swap"):
            raise InvalidArgumentError(f'mode: expected "recompute" or "swap", got {mode!r}')
        if not seq.running:
            if seq.host is not None and mode == "swap":
                return "swap"
            drop_host(self, seq)
            seq.num_computed = 0
            return "recompute"
        self.num_preemptions += 1
        host = swap_out(self, seq) if mode == "swap" else None
        give_back(self, seq)
        seq.detach()
        seq.host = host
        if host is None:
            seq.num_computed = 0
            return "recompute"
        self.num_swaps += 1
        return "swap"

    # Moves, cache, accounts.

    def take_copies(self) -> Pairs:
        """Pending (source, destination) copies, now the caller's: to be applied between swap-outs and swap-ins."""
        return self.transfers.take_copies()

    def take_swaps(self) -> tuple[Pairs, Pairs]:
        """Pending (device, host) swap-outs and (host, device) swap-ins, now the caller's."""
        return self.transfers.take_swaps()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing changes, while any block is referenced or pinned."""
        return self.pool.reset()

    def take_events(self) -> list[tuple[Any, ...]]:
        """("stored", hash, parent, tokens), ("removed", hash), ("cleared",) since the last call, in order.

        A hash is stored when its first block appears and removed with its last one.
        """
        events = self.pool.events
        if not events:
            return []
        self.pool.events = []
        return events

    def stats(self, bytes_per_block: int | None = None) -> KVCacheStats:
        """Counters and what the used blocks hold now; bytes where the size of a block over all layers is given."""
        return collect_stats(self, None if bytes_per_block is None else _count("bytes_per_block", bytes_per_block))

    def explain(self, seq_id: SeqId) -> PrefixExplanation:
        """Why the sequence's prefix was not served from the cache any further than it was."""
        return explain_prefix(self, self._get(seq_id))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, references, pins, tables and the index agree."""
        check_manager(self)

    def _needed(self, tokens: array[int] | int) -> array[int] | int:
        """Ids are kept for hashing alone; without it their number does."""
        return tokens if self.prefix_caching or isinstance(tokens, int) else len(tokens)

    def _get(self, seq_id: SeqId) -> SequenceState:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise UnknownSequenceError(f"sequence {seq_id!r} is unknown: never added, or freed") from None
        except TypeError:
            raise refused("seq_id", "a hashable id", seq_id) from None

    def _check_new(self, seq_id: SeqId) -> None:
        try:
            exists = seq_id in self.sequences
        except TypeError:
            raise refused("seq_id", "a hashable id", seq_id) from None
        if exists:
            raise DuplicateSequenceError(f"sequence {seq_id!r} exists")


def _keys(extra_keys: ExtraKeys, cache_salt: Any) -> KeySet:
    if not extra_keys and cache_salt is None:
        return NO_KEYS
    return KeySet(listed("extra_keys", extra_keys, "a sequence of tuples"), cache_salt)


def _count(name: str, value: int) -> int:
    return integer(name, value, 0)
