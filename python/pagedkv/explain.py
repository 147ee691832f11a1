"""Why a prefix was not served from the cache any further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.prefix import Link, common_tokens, same_prefix
from pagedkv.token_ids import TOKEN_BYTES, unpack_tokens

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """num_cached_tokens of num_tokens were attached (would be attached now, before the first allocation).

    reason: "hit" (all that can be), "disabled", "unknown_tokens", "short" (less than one block to look up), "evicted",
    "salt_differs", "keys_differ", "tokens_differ", or "never_committed" (nothing equal was committed at that time).
    block: the first block that was not a hit, None for the first four. detail: one sentence.
    """

    num_tokens: int
    num_cached_tokens: int
    reason: str
    block: int | None
    detail: str


def explain_prefix(manager: KVCacheManager, seq: SequenceState) -> PrefixExplanation:
    cached = seq.num_hit if seq.running else 0
    if not manager.prefix_caching:
        return PrefixExplanation(seq.num_tokens, 0, "disabled", None, "prefix caching is off")
    limit = min(seq.num_known, seq.num_tokens - 1)
    if not seq.running:
        hit = manager.lookup.find(seq.links(), seq.tokens, seq.keys, limit)
        cached = hit.num_tokens + hit.tail_tokens
    step = manager.lookup.step
    block = cached // step
    if seq.num_known == 0 and seq.num_tokens:
        return PrefixExplanation(seq.num_tokens, cached, "unknown_tokens", None, "its token ids are not known")
    if limit < step:
        detail = f"at most {max(limit, 0)} of its tokens can be looked up, a block holds {step}"
        return PrefixExplanation(seq.num_tokens, cached, "short", None, detail)
    if (block + 1) * step > limit:
        return PrefixExplanation(seq.num_tokens, cached, "hit", None, "every full block that can be attached was")
    reason, detail = _first_miss(manager, seq, block)
    return PrefixExplanation(seq.num_tokens, cached, reason, block, detail)


def _first_miss(manager: KVCacheManager, seq: SequenceState, step_index: int) -> tuple[str, str]:
    chunks = manager.lookup.step // manager.hasher.chunk
    chain = seq.links()
    manager.hasher.extend(chain, seq.tokens, seq.keys, (step_index + 1) * chunks)
    wanted = chain[step_index * chunks : (step_index + 1) * chunks]
    hashes = {link.hash + suffix for link in wanted for suffix in manager.lookup.suffixes}
    gone = hashes.intersection(manager.pool.evicted)
    if gone:
        return "evicted", f"block {step_index} was cached, and its blocks were reused for something else"
    own = {block for table in seq.tables for block in table}
    others = [link for block, link in enumerate(manager.pool.contents) if link is not None and block not in own]
    tokens = [link.tokens for link in chain]
    for link in others:
        if link.hash == wanted[-1].hash and same_prefix(link, wanted[-1]):
            return (
                "never_committed",
                f"block {step_index} was committed by another sequence only after this one was looked up",
            )
    for link in others:
        difference = _key_difference(link, chain, tokens)
        if difference:
            return difference
    parent = wanted[0].parent
    best, theirs = -1, b""
    for link in others:
        if same_prefix(link.parent, parent):
            common = common_tokens(link, wanted[0].tokens, wanted[0].extras)
            if common > best:
                best, theirs = common, link.tokens
    if best > 0 or (best == 0 and step_index > 0):
        position = step_index * manager.lookup.step + best
        at = slice(best * TOKEN_BYTES, (best + 1) * TOKEN_BYTES)
        if theirs[at] and theirs[at] != wanted[0].tokens[at]:
            mine, other = unpack_tokens(wanted[0].tokens[at])[0], unpack_tokens(theirs[at])[0]
            return "tokens_differ", f"token {position} is {mine}, the nearest cached block has {other}"
    return "never_committed", f"nothing equal to block {step_index} was committed"


def _key_difference(link: Link, chain: list[Link], tokens: list[bytes]) -> tuple[str, str] | None:
    """Names the first block whose keys differ, when the cached prefix has the same tokens up to the wanted block."""
    if link.tokens != tokens[-1]:
        return None
    theirs: list[Link] = []
    current: Link | None = link
    while current is not None:
        theirs.append(current)
        current = current.parent
    theirs.reverse()
    if [item.tokens for item in theirs] != tokens:
        return None
    for number, (mine, other) in enumerate(zip(chain, theirs, strict=True)):
        changed = set(mine.extras) ^ set(other.extras)
        if changed:
            salted = all(pair.startswith(b"Z") for pair, _ in changed)
            what = "salt" if salted else "extra keys"
            return (
                "salt_differs" if salted else "keys_differ"
            ), f"an equal prefix is cached under another {what} (block {number})"
    return None
