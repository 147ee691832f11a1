"""KVCacheManager: the calls, their arguments checked, over the modules that do the work."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

from pagedkv.errors import InvalidArgumentError, TruncationError, integer, listed
from pagedkv.manager import commits, sharing, steps
from pagedkv.manager.allocation import Allocation, SlotRequest, admit, allocate, allocate_next
from pagedkv.manager.groups import GroupSpec
from pagedkv.manager.hashing import NO_KEYS, ExtraKeys, HashFn, KeySet
from pagedkv.manager.inspection import (
    KVCacheStats,
    PrefixExplanation,
    check_state,
    collect_stats,
    explain_prefix,
)
from pagedkv.manager.moves import BlockPairs
from pagedkv.manager.search import find
from pagedkv.manager.sequence import SequenceState
from pagedkv.manager.state import ManagerSettings, State
from pagedkv.manager.steps import DecodeStep
from pagedkv.manager.tokens import TokenIds, pack_tokens

SeqId = Hashable


class KVCacheManager:
    """Map sequences to blocks of a `BlockPool` (`manager.pool`), sharing equal prefixes.

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

    >>> manager = KVCacheManager(num_blocks=10, block_size=4)
    >>> manager.add("request", [5, 6, 7, 8, 9, 10])
    >>> granted = manager.allocate_slots("request")
    >>> granted.new_block_ids, granted.slots
    ([1, 2], [4, 5, 6, 7, 8, 9])
    >>> manager.commit("request", 6)
    >>> manager.match_prefix([5, 6, 7, 8, 1])
    4

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
        settings = ManagerSettings(
            num_blocks,
            block_size,
            enable_prefix_caching,
            partial_hits,
            sliding_window,
            hash_fn,
            watermark,
            num_host_blocks,
            record_events,
            groups,
            causal,
        )
        self.state = State(settings)
        self.pool = self.state.pool
        self.sequences = self.state.sequences
        self.block_size = settings.block_size
        self.num_host_blocks = settings.num_host_blocks
        self.grouped = groups is not None

    def __copy__(self) -> KVCacheManager:
        raise TypeError("a KVCacheManager cannot be copied and share its blocks: copy.deepcopy gives one of its own")

    def __repr__(self) -> str:
        pool, state = self.pool, self.state
        used = f"{pool.num_usable - pool.num_free} of {pool.num_usable} blocks of {self.block_size} tokens"
        groups = f", {len(state.groups)} groups" if self.grouped else ""
        return f"KVCacheManager({used} used, {len(self.sequences)} sequences, {state.num_running} running{groups})"

    # Sequences and their tokens.

    def match_prefix(self, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> int:
        """How many leading tokens are cached now, at most all but the last; no side effects."""
        tokens = pack_tokens(token_ids)
        keys = _keys(extra_keys, cache_salt)
        if not self.state.prefix_caching or isinstance(tokens, int):
            return 0
        hit = find(self.state, [], TokenIds(tokens), keys, len(tokens) - 1)
        return hit.num_tokens + hit.tail_tokens

    def add(self, seq_id: SeqId, token_ids: Any, *, extra_keys: ExtraKeys = (), cache_salt: Any = None) -> None:
        """Register a sequence; allocate nothing.

        Args:
            token_ids: ids (any sequence of ints of at least 0, an array or a tensor), or a count where they are
                unknown. None yet, [] or 0, is legal: `append` brings them.
            extra_keys: what else its KV depends on: (kind, value), or (kind, value, start, end) for a range of
                positions. Only sequences with equal keys share blocks; values are plain ones.
            cache_salt: sequences share nothing with those of another salt.

        Raises:
            DuplicateSequenceError: the id is in use.
        """
        self.state.check_new(seq_id)
        seq = SequenceState(seq_id, _keys(extra_keys, cache_salt), len(self.state.groups))
        seq.extend(self._known(token_ids))
        self.sequences[seq_id] = seq

    def append(self, seq_id: SeqId, token_ids: Any) -> None:
        """Add tokens that exist now (sampled), as ids or as a count."""
        self.state.get(seq_id).extend(self._known(token_ids))

    def _known(self, token_ids: Any) -> array[int] | int:
        """Ids are kept for hashing alone; without it their number does."""
        tokens = pack_tokens(token_ids)
        return tokens if self.state.prefix_caching or isinstance(tokens, int) else len(tokens)

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence to `num_tokens`, a length, and drop its lookahead slots.

        Raises:
            TruncationError: longer than the sequence, or negative.
            ReleasedPositionError: the next token would see positions that a window has given back.
        """
        seq = self.state.get(seq_id)
        length = integer("num_tokens", num_tokens)
        if not 0 <= length <= seq.num_tokens:
            raise TruncationError(f"num_tokens: expected 0..{seq.num_tokens} for sequence {seq_id!r}, got {length}")
        sharing.truncate(self.state, seq, length)

    def free(self, seq_id: SeqId) -> None:
        """Forget a sequence; its blocks keep their hashes until they are reused."""
        seq = self.state.get(seq_id)
        del self.sequences[seq_id]
        sharing.give_back(self.state, seq)

    def block_ids(self, seq_id: SeqId) -> list[Any]:
        """The block table; 0 where a window has passed. With groups one list per group."""
        tables = [table.tolist() for table in self.state.get(seq_id).tables]
        return tables if self.grouped else tables[0]

    def num_computed_tokens(self, seq_id: SeqId) -> int:
        """Tokens whose KV is held: committed ones, on the host too while the sequence is swapped out."""
        return self.state.get(seq_id).num_computed

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens that exist."""
        return self.state.get(seq_id).num_tokens

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
        """Make sure that the next tokens have slots; None, and nothing changes, when blocks are missing.

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
        state = self.state
        seq = state.get(seq_id)
        others = num_external_tokens or num_lookahead_tokens
        granted: Allocation | None
        if num_new_tokens == 1 and not others and seq.num_computed < min(seq.fast_end, seq.num_tokens) and state.causal:
            granted = allocate_next(state, seq)
        else:
            request = SlotRequest(
                None if num_new_tokens is None else _count("num_new_tokens", num_new_tokens),
                _count("num_external_tokens", num_external_tokens),
                _count("num_lookahead_tokens", num_lookahead_tokens),
                seq.num_tokens,
            )
            granted = allocate(state, seq, request) if seq.running else admit(state, seq, request)
        return granted if self.grouped or granted is None else granted.of_one_group()

    def commit(self, seq_id: SeqId, num_tokens: int) -> None:
        """So many more tokens have their KV written; blocks that they fill are published.

        Raises:
            CommitError: past the existing tokens, or past the granted slots.
            PendingCopyError: a block of theirs still waits for a copy or a swap-in that was not taken.
        """
        commits.commit(self.state, self.state.get(seq_id), _count("num_tokens", num_tokens))

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
        return steps.append_step(self.state, seq_ids, tokens)

    def commit_step(self, seq_ids: Sequence[SeqId]) -> None:
        """`commit(seq_id, 1)` for many sequences in one call; raises as it does, before anything changes."""
        steps.commit_step(self.state, seq_ids)

    # Sharing and preemption.

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """A child with the parent's committed tokens, on the same blocks.

        Raises:
            DuplicateSequenceError: the child's id is in use.
        """
        parent = self.state.get(parent_id)
        self.state.check_new(child_id)
        self.sequences[child_id] = sharing.share(self.state, parent, child_id)

    def reorder(self, seq_ids: Sequence[SeqId], parents: Sequence[int]) -> None:
        """Let sequence i go on from the committed tokens of what seq_ids[parents[i]] is now.

        Raises:
            DuplicateSequenceError: an id is named twice.
            InvalidArgumentError: another number of parents than ids, or an index out of range.
        """
        indices = [_count("parents", parent) for parent in listed("parents", parents, "a sequence of indices")]
        sharing.reorder(self.state, listed("seq_ids", seq_ids, "a sequence of hashable ids"), indices)

    def preempt(self, seq_id: SeqId, mode: str = "recompute") -> str:
        """Take a sequence's blocks, not its tokens; the next `allocate_slots` attaches what is cached, or swaps in.

        mode: "recompute"; or "swap": its KV goes to the host pool, unless that is too full: then as "recompute".
        Returns what was done.
        """
        seq = self.state.get(seq_id)
        if mode not in ("recompute", "swap"):
            raise InvalidArgumentError(f'mode: expected "recompute" or "swap", got {mode!r}')
        return sharing.preempt(self.state, seq, mode)

    @property
    def num_preemptions(self) -> int:
        return self.state.num_preemptions

    # Moves, cache, accounts.

    def take_copies(self) -> BlockPairs:
        """Pending (source, destination) copies, now the caller's: to be applied between swap-outs and swap-ins."""
        return self.state.moves.take_copies()

    def take_swaps(self) -> tuple[BlockPairs, BlockPairs]:
        """Pending (device, host) swap-outs and (host, device) swap-ins, now the caller's."""
        return self.state.moves.take_swaps()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changes, while any block is referenced or pinned."""
        return self.pool.reset()

    def take_events(self) -> list[tuple[Any, ...]]:
        """("stored", hash, parent, tokens), ("removed", hash), ("cleared",) since the last call, in order.

        A hash is stored when its first block appears and removed with its last one.
        """
        return self.pool.take_events()

    def stats(self, bytes_per_block: int | None = None) -> KVCacheStats:
        """Counters and what the used blocks hold now; bytes where the size of a block over all layers is given."""
        size = None if bytes_per_block is None else _count("bytes_per_block", bytes_per_block)
        return collect_stats(self.state, size)

    def explain(self, seq_id: SeqId) -> PrefixExplanation:
        """Why the sequence's prefix was not served from the cache any further than it was."""
        return explain_prefix(self.state, self.state.get(seq_id))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, references, pins, tables and the index agree."""
        check_state(self.state)


def _keys(extra_keys: ExtraKeys, cache_salt: Any) -> KeySet:
    if not extra_keys and cache_salt is None:
        return NO_KEYS
    return KeySet(listed("extra_keys", extra_keys, "a sequence of tuples"), cache_salt)


def _count(name: str, value: int) -> int:
    return integer(name, value, 0)
