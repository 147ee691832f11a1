"""What a manager holds, why a prefix was no hit, and whether everything agrees. These calls look at everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pagedkv.manager.blocks import require
from pagedkv.manager.hashing import Link, chain_of, common_tokens, same_prefix
from pagedkv.manager.search import find
from pagedkv.manager.sequence import SequenceState
from pagedkv.manager.state import State
from pagedkv.manager.tokens import TOKEN_BYTES, unpack_tokens


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """Blocks without the null block: used ones are referenced or pinned, cached ones carry a hash (used or free).

    Attributes:
        num_tokens: committed tokens in the blocks of tables, a shared block counted once (with groups: over all).
        wasted_slots: the slots there that hold none.
        wasted_percent: of all of them.
        wasted_bytes: None unless the size of a block was given.
        hit_rate: cached / asked tokens over the last 1000 admissions, 0 when there were none.
    """

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_sequences: int
    num_running: int
    num_tokens: int
    wasted_slots: int
    wasted_percent: float
    wasted_bytes: int | None
    hit_rate: float
    num_evictions: int
    num_preemptions: int
    num_swaps: int
    num_copies: int


def collect_stats(state: State, bytes_per_block: int | None) -> KVCacheStats:
    blocks, host = state.pool, state.moves.host
    num_slots, wasted, share = _wasted_slots(state)
    asked = sum(asked for asked, _ in state.recent_hits)
    return KVCacheStats(
        num_blocks=blocks.num_usable,
        num_used_blocks=blocks.num_usable - blocks.num_free,
        num_cached_blocks=state.pool.num_published,
        num_free_blocks=blocks.num_free,
        num_host_blocks=len(host.refs),
        num_used_host_blocks=len(host.refs) - len(host.free),
        num_sequences=len(state.sequences),
        num_running=state.num_running,
        num_tokens=num_slots - wasted,
        wasted_slots=wasted,
        wasted_percent=100.0 * wasted / num_slots if num_slots else 0.0,
        wasted_bytes=None if bytes_per_block is None else round(share * bytes_per_block),
        hit_rate=sum(hit for _, hit in state.recent_hits) / asked if asked else 0.0,
        num_evictions=state.index.num_evictions,
        num_preemptions=state.num_preemptions,
        num_swaps=state.num_swaps,
        num_copies=state.moves.num_copies,
    )


def _wasted_slots(state: State) -> tuple[int, int, float]:
    """Slots of the blocks in tables, those among them that hold no token, and the latter in blocks.

    A block is filled as far as the owner that has committed most into it.
    """
    num_slots, wasted, share = 0, 0, 0.0
    for number, group in enumerate(state.groups):
        size = group.block_size
        filled: dict[int, int] = {}  # tokens by block
        for seq in state.sequences.values():
            table, num_full = seq.tables[number], seq.num_computed // size
            filled.update(dict.fromkeys(table[:num_full], size))
            for index, block in enumerate(table[num_full:], num_full):
                filled[block] = max(filled.get(block, 0), seq.num_computed - size * index)
        filled.pop(0, None)
        empty = size * len(filled) - sum(filled.values())
        num_slots += size * len(filled)
        wasted += empty
        share += empty / size
    return num_slots, wasted, share


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """num_cached_tokens of num_tokens were attached (would be attached now, before the first allocation).

    Attributes:
        reason: "hit" (all that can be), "disabled", "unknown_tokens", "short" (less than one block to look up),
            "evicted", "salt_differs", "keys_differ", "tokens_differ", or "never_committed" (nothing equal was
            committed at that time).
        block: the first block that was not a hit, None for the first four.
        detail: one sentence.
    """

    num_tokens: int
    num_cached_tokens: int
    reason: str
    block: int | None
    detail: str


def explain_prefix(state: State, seq: SequenceState) -> PrefixExplanation:
    def because(reason: str, detail: str, block: int | None = None) -> PrefixExplanation:
        return PrefixExplanation(seq.num_tokens, cached, reason, block, detail)

    cached, step = 0, state.step
    if not state.prefix_caching:
        return because("disabled", "prefix caching is off")
    known = len(seq.tokens)
    limit = min(known, seq.num_tokens - 1)
    if seq.running:
        cached = seq.num_hit
    else:
        hit = find(state, seq.links(), seq.tokens, seq.keys, limit)
        cached = hit.num_tokens + hit.tail_tokens
    if not known and seq.num_tokens:
        return because("unknown_tokens", "its token ids are not known")
    if limit < step:
        return because("short", f"at most {max(limit, 0)} of its tokens can be looked up, a block holds {step}")
    block = cached // step
    if (block + 1) * step > limit:
        return because("hit", "every full block that can be attached was")
    miss = _Miss(state, seq, block)
    reason, detail = (
        miss.evicted()
        or miss.late()
        or miss.keys_differ()
        or miss.tokens_differ()
        or ("never_committed", f"nothing equal to block {block} was committed")
    )
    return because(reason, detail, block)


Cause = tuple[str, str] | None  # reason, one sentence


class _Miss:
    """The first block that was no hit: its links, the chain up to them, and the links of blocks of other sequences."""

    def __init__(self, state: State, seq: SequenceState, block: int) -> None:
        chunks = state.step // state.hasher.chunk
        self.state, self.block, self.chain = state, block, seq.links()
        state.hasher.extend(self.chain, seq.tokens, seq.keys, (block + 1) * chunks)
        self.wanted = self.chain[block * chunks : (block + 1) * chunks]
        own = {block for table in seq.tables for block in table}
        contents = enumerate(state.index.contents)
        self.others = [link for block, link in contents if isinstance(link, Link) and block not in own]

    def evicted(self) -> Cause:
        hashes = {link.hash + group.suffix for link in self.wanted for group in self.state.groups}
        if hashes.isdisjoint(self.state.index.evicted):
            return None
        return "evicted", f"block {self.block} was cached, and its blocks were reused for something else"

    def late(self) -> Cause:
        last = self.wanted[-1]
        if not any(link.hash == last.hash and same_prefix(link, last) for link in self.others):
            return None
        detail = f"block {self.block} was committed by another sequence only after this one was looked up"
        return "never_committed", detail

    def keys_differ(self) -> Cause:
        """Name the first block whose keys differ, when a cached prefix has the same tokens up to the wanted block."""
        tokens = [link.tokens for link in self.chain]
        for link in self.others:
            theirs = chain_of(link) if link.tokens == tokens[-1] else []
            if [item.tokens for item in theirs] != tokens:
                continue
            for number, (mine, other) in enumerate(zip(self.chain, theirs, strict=True)):
                changed = set(mine.extras) ^ set(other.extras)
                if changed:
                    is_salt = all(pair.startswith(b"Z") for pair, _ in changed)
                    what = "salt" if is_salt else "extra keys"
                    detail = f"an equal prefix is cached under another {what} (block {number})"
                    return "salt_differs" if is_salt else "keys_differ", detail
        return None

    def tokens_differ(self) -> Cause:
        """Name the first token that differs from the nearest block behind the same prefix."""
        wanted = self.wanted[0]
        best, theirs = -1, b""
        for link in self.others:
            if same_prefix(link.parent, wanted.parent):
                common = common_tokens(link, wanted.tokens, wanted.extras)
                if common > best:
                    best, theirs = common, link.tokens
        at = slice(best * TOKEN_BYTES, (best + 1) * TOKEN_BYTES)
        nothing_in_common = best < 0 or (best == 0 and self.block == 0)
        if nothing_in_common or not theirs[at] or theirs[at] == wanted.tokens[at]:
            return None
        (mine,), (other,) = unpack_tokens(wanted.tokens[at]), unpack_tokens(theirs[at])
        position = self.block * self.state.step + best
        return "tokens_differ", f"token {position} is {mine}, the nearest cached block has {other}"


def check_state(state: State) -> None:
    """Raise IntegrityError unless free + in use + null = total, references equal those from tables, pins and the host
    pool equal the pending moves and every table fits its sequence."""
    blocks = state.pool
    blocks.check_integrity()
    references: Counter[int] = Counter()
    host_references = [0] * len(state.moves.host.refs)
    for seq in state.sequences.values():
        _check_sequence(state, seq)
        for table in seq.tables:
            references.update(table)
        for host in (host for hosts in seq.host or () for host in hosts if host >= 0):
            host_references[host] += 1
    del references[0]
    wrong = [(block, count) for block, count in enumerate(blocks.refs) if references[block] != count]
    require(not wrong, f"blocks with other reference counts than the tables give: {wrong}")
    num_used = len(references.keys() | blocks.pins.keys())
    total = f"{blocks.num_free} free + {num_used} used + 1 null are not {blocks.num_blocks} blocks"
    require(blocks.num_free + num_used + 1 == blocks.num_blocks, total)
    num_running = sum(seq.running for seq in state.sequences.values())
    require(num_running == state.num_running, f"{num_running} sequences run, the manager counts {state.num_running}")
    state.moves.check_integrity(host_references)


def _check_sequence(state: State, seq: SequenceState) -> None:
    links, contents = seq.links(), state.index.contents
    conditions = {
        "computed tokens exceed the existing ones": 0 <= seq.num_computed <= seq.num_tokens,
        "more ids than tokens": len(seq.tokens) <= seq.num_tokens,
        "hashed past the known tokens": seq.num_links * state.hasher.chunk <= len(seq.tokens),
        "runs while it is swapped out": not (seq.running and seq.host is not None),
        "holds blocks without running": seq.running or not any(seq.tables),
        "computed past the granted slots": not seq.running or seq.num_computed <= seq.num_granted,
        "published past the computed tokens": seq.published <= seq.num_computed,
    }
    for number, (group, table) in enumerate(zip(state.groups, seq.tables, strict=True)):
        size, released = group.block_size, seq.released[number]
        held = table[released:].tolist()
        hosts = -(-seq.num_computed // size) if seq.host is None else len(seq.host[number])
        awaited = {index for group_number, index in seq.awaited if group_number == number}
        wrong = [
            block
            for index, block in enumerate(table[: seq.published // size])
            if block
            and contents[block] is not None
            and contents[block].tokens != links[(index + 1) * group.chunks_per_block - 1].tokens
        ]
        conditions |= {
            f"a released block of group {number} is not null": not any(table[:released]),
            f"the null block stands among blocks in sight of group {number}": all(held),
            f"a table of group {number} names a block twice": len(set(held)) == len(held),
            f"granted slots of group {number} have no block": len(table) * size >= seq.num_granted,
            f"host table {number} has a wrong length": hosts == -(-seq.num_computed // size),
            f"blocks {wrong} were published wrongly": not wrong,
            f"a pending move into a block of group {number} is not awaited": not state.moves
            or all(index in awaited or not state.moves.is_pending(block) for index, block in enumerate(table)),
        }
    for message, holds in conditions.items():
        require(holds, f"sequence {seq.seq_id!r}: {message}")
