"""Finding the cached prefix of a sequence over all attention groups."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.block_pool import BlockPool
from pagedkv.groups import Group
from pagedkv.prefix import (
    ChainHasher,
    Extras,
    KeySet,
    Link,
    adopt,
    common_tokens,
    same_prefix,
)
from pagedkv.token_ids import TOKEN_BYTES, TokenIds


@dataclass(slots=True)
class Hit:
    """num_tokens of whole blocks with one table per group (0 where a window has passed), then tail_tokens more in
    tail_blocks, one block per group, when a cached block begins like the rest of the sequence."""

    num_tokens: int
    tables: list[array[int]]
    tail_tokens: int = 0
    tail_blocks: Sequence[int] = ()

    def with_tail(self) -> list[array[int]]:
        if not self.tail_tokens:
            return self.tables
        return [table + array("q", [block]) for table, block in zip(self.tables, self.tail_blocks, strict=True)]


class PrefixLookup:
    """Looks chains up in a pool's index; a block is a hit only if everything that was hashed is equal.

    Groups share one chain and differ by a suffix of the index key, so that each chunk is hashed once for all of them.
    """

    def __init__(
        self, pool: BlockPool, groups: Sequence[Group], hasher: ChainHasher, step: int, *, partial_hits: bool
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.hasher = hasher
        self.step = step
        self.partial_hits = partial_hits
        self.suffixes = [b"" if number == 0 else number.to_bytes(4, "little") for number in range(len(groups))]
        # full groups first: they bound the search of the others
        self._order = sorted(range(len(groups)), key=lambda number: not groups[number].is_full)
        # blocks by group, hash of the parent and first token, for partial hits
        self._children: dict[tuple[int, bytes, bytes], dict[int, None]] = {}
        pool.on_unpublish = self._note_unpublished

    def find(self, chain: list[Link], tokens: TokenIds, keys: KeySet, max_tokens: int) -> Hit:
        """The longest prefix of at most `max_tokens` tokens that every group can serve; extends `chain` as needed."""
        max_tokens = max(max_tokens, 0)
        search = _Search(self, chain, tokens, keys)
        hit = search.run(max_tokens // self.step * self.step)
        if self.partial_hits:
            self._find_tail(hit, chain, tokens, keys, max_tokens)
        return hit

    def block_at(self, number: int, chain: list[Link], block: int) -> int:
        """A cached block of group `number` that holds block `block` of the chain, or 0."""
        last = (block + 1) * self.groups[number].chunks_per_block - 1
        link = chain[last]
        for candidate in self.pool.carriers(link.hash + self.suffixes[number]):
            content = self.pool.contents[candidate]
            if content is link:
                return candidate
            if same_prefix(content, link):
                adopt(chain, last, content)
                return candidate
        return 0

    def add_child(self, number: int, block: int, link: Link) -> None:
        """Makes a published block known to partial hits."""
        self._children.setdefault(self._child_key(number, link), {})[block] = None

    def _note_unpublished(self, gone: list[tuple[int, Link | None]]) -> None:
        for block, link in gone:
            if link is None:
                continue
            parent = link.parent
            if parent is not None and parent.next is link:
                parent.next = None
            if self.partial_hits:
                self._remove_child(block, link)

    def _remove_child(self, block: int, link: Link) -> None:
        for number in range(len(self.groups)):
            key = self._child_key(number, link)
            children = self._children.get(key, {})
            if block in children:
                del children[block]
                if not children:
                    del self._children[key]

    def _child_key(self, number: int, link: Link) -> tuple[int, bytes, bytes]:
        return number, link.parent.hash if link.parent else b"", link.tokens[:TOKEN_BYTES]

    def _find_tail(self, hit: Hit, chain: list[Link], tokens: TokenIds, keys: KeySet, max_tokens: int) -> None:
        size = self.step
        number_of_block = hit.num_tokens // size
        rest = tokens.to_bytes(hit.num_tokens, min(max_tokens, hit.num_tokens + size))
        if not rest:
            return
        parent = chain[number_of_block - 1] if number_of_block else None
        extras = keys.at(hit.num_tokens, hit.num_tokens + size)
        blocks, length = [], len(rest) // TOKEN_BYTES
        for number in range(len(self.groups)):
            key = (number, parent.hash if parent else b"", rest[:TOKEN_BYTES])
            best, best_block = 0, 0
            for block in self._children.get(key, ()):
                link = self.pool.contents[block]
                common = common_tokens(link, rest, extras)
                if common > best and same_prefix(link.parent, parent):
                    best, best_block = common, block
            blocks.append(best_block)
            length = min(length, best)
        if length:
            hit.tail_tokens, hit.tail_blocks = length, blocks


def _equal(content: Link, parent: Link, tokens: bytes, extras: Extras) -> bool:
    return content.parent is parent and content.tokens == tokens and content.extras == extras


class _Search:
    """One search: remembers what each group was found to hold."""

    def __init__(self, lookup: PrefixLookup, chain: list[Link], tokens: TokenIds, keys: KeySet) -> None:
        self.lookup = lookup
        self.chain = chain
        self.tokens = tokens
        self.keys = keys
        self.runs: dict[int, list[int]] = {}
        self.found: list[dict[int, int]] = [{} for _ in lookup.groups]

    def run(self, length: int) -> Hit:
        """Every group's answer only ever shortens the prefix; a round that changes nothing ends the search."""
        groups, step = self.lookup.groups, self.lookup.step
        unsettled = True
        while length and unsettled:
            unsettled = False
            for number in self.lookup._order:
                served = (self._full if groups[number].is_full else self._windowed)(number, length, step)
                unsettled = unsettled or served != length
                length = served
            unsettled = unsettled and len(groups) > 1
        return Hit(length, [self._table(number, length) for number in range(len(groups))])

    def _table(self, number: int, length: int) -> array[int]:
        group = self.lookup.groups[number]
        num_blocks = length // group.block_size
        if group.is_full:
            return array("q", self.runs.get(number, [])[:num_blocks])
        first = group.first_needed(num_blocks) if num_blocks else 0
        return array("q", [0] * first + [self._cached(number, block) for block in range(first, num_blocks)])

    def _full(self, number: int, length: int, step: int) -> int:
        group = self.lookup.groups[number]
        num_blocks = length // group.block_size
        run = self.runs.get(number)
        if run is None:
            run = self._long_run(number, num_blocks) if group.chunks_per_block > 1 else self._run(number, num_blocks)
            self.runs[number] = run
        return min(num_blocks, len(run)) * group.block_size // step * step

    def _windowed(self, number: int, length: int, step: int) -> int:
        group = self.lookup.groups[number]
        while length:
            num_blocks = length // group.block_size
            for block in range(num_blocks - 1, group.first_needed(num_blocks) - 1, -1):
                if not self._cached(number, block):
                    # what is needed never moves to the right as the prefix gets shorter, so this block has to go
                    length = block * group.block_size // step * step
                    break
            else:
                break
        return length

    def _cached(self, number: int, block: int) -> int:
        found = self.found[number]
        if block not in found:
            group = self.lookup.groups[number]
            if (block + 1) * group.chunks_per_block > len(self.chain):
                self._extend((block + 1) * group.chunks_per_block)
            found[block] = self.lookup.block_at(number, self.chain, block)
        return found[block]

    def _extend(self, num_chunks: int) -> None:
        self.lookup.hasher.extend(self.chain, self.tokens, self.keys, num_chunks)

    def _long_run(self, number: int, num_blocks: int) -> list[int]:
        run: list[int] = []
        while len(run) < num_blocks and (block := self._cached(number, len(run))):
            run.append(block)
        return run

    def _run(self, number: int, num_blocks: int) -> list[int]:
        """Blocks of one chunk from the left until one is missing, hashing no further than that.

        New links get the cached links as parents, so that equality is decided by one comparison of identity.
        """
        lookup, chain, hasher = self.lookup, self.chain, self.lookup.hasher
        known_links = max(len(chain), 1)  # the first chunk may have a salt
        if self.keys.ranges or not hasher.is_sha256 or known_links >= num_blocks:
            return self._long_run(number, num_blocks)
        run = self._long_run(number, known_links)
        if len(run) < known_links:
            return run
        extras, extra_bytes = self.keys.whole, self.keys.whole_bytes
        get, contents, sha256 = lookup.pool.index.get, lookup.pool.contents, hashlib.sha256
        width, suffix = hasher.chunk * TOKEN_BYTES, lookup.suffixes[number]
        first = len(chain) * hasher.chunk
        data = self.tokens.to_bytes(first, num_blocks * hasher.chunk)
        parent = chain[-1]
        for low in range(0, len(data), width):
            chunk = data[low : low + width]
            link = parent.next
            if link is None or link.tokens != chunk or link.extras != extras:
                link = Link(sha256(parent.hash + chunk + extra_bytes).digest(), parent, chunk, extras)
            known = get(link.hash + suffix)
            if known.__class__ is int:
                content = contents[known]
                if content is link or (content is not None and _equal(content, parent, chunk, extras)):
                    parent = content
                    chain.append(parent)
                    run.append(known)
                    continue
            chain.append(link)
            block = lookup.block_at(number, chain, len(run)) if known is not None else 0
            if not block:
                break
            parent = chain[-1]
            run.append(block)
        return run
