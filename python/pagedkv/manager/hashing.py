"""Prefix identity: a canonical byte encoding, extra keys, and the chain of hashes over a sequence's chunks of tokens.

A chunk's hash covers its parent's hash, its tokens (8 bytes each, little-endian) and its extra keys; the salt enters
the first chunk alone. Nothing depends on the process: no pickle, no `hash()`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import InvalidArgumentError
from pagedkv.manager.tokens import TOKEN_BYTES, TokenIds

HashFn = Callable[[bytes], bytes]
ExtraKeys = Sequence[tuple[Any, ...]]
Extras = tuple[tuple[bytes, int], ...]  # (encoded pair, first position in the chunk it concerns), sorted


@dataclass(slots=True, eq=False)
class Link:
    """One chunk of a prefix, and through `parent` everything before it.

    next: the link behind it that was published last; following it spares a look-up the hashing (0.35 us a block).
    """

    hash: bytes
    parent: Link | None
    tokens: bytes
    extras: Extras
    next: Link | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # without its neighbours, which would recurse once per chunk: `tied` carries them beside the links
        return Link, (self.hash, None, self.tokens, self.extras)


def encode(value: Any, name: str = "extra_keys") -> bytes:
    """A self-delimiting encoding of plain values: equal bytes exactly for equal values of one type.

    name: of the argument, for errors.
    """
    try:
        return _encoded(value)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name}: expected plain values (None, bool, int, float, str, bytes, containers of them), got {error}"
        ) from None
    except RecursionError:
        raise InvalidArgumentError(
            f"{name}: expected values that are not nested so deeply, nor in themselves"
        ) from None


def _encoded(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"B1" if value else b"B0"
    if isinstance(value, str):
        return _sized(b"S", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return _sized(b"Y", bytes(value))
    if isinstance(value, float):
        return b"F" + struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return _sized(b"T", b"".join(map(_encoded, value)))
    if isinstance(value, set | frozenset):
        return _sized(b"E", b"".join(sorted(map(_encoded, value))))
    if isinstance(value, dict):
        return _sized(b"D", b"".join(sorted(_encoded(key) + _encoded(item) for key, item in value.items())))
    if not hasattr(value, "__index__"):
        raise TypeError(type(value).__name__)
    return _sized(b"I", b"%d" % operator.index(value))


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


class KeySet:
    """The extra keys and the salt of one sequence, encoded once.

    Pairs (kind, value) concern every chunk; (kind, value, start, end) the chunks that overlap positions [start, end),
    with the offset of `start` in the chunk.
    """

    __slots__ = ("_ends", "_first", "_starts", "ranges", "whole", "whole_bytes")

    def __init__(self, extra_keys: ExtraKeys, cache_salt: Any) -> None:
        whole: set[tuple[bytes, int]] = set()
        self.ranges: list[tuple[bytes, int, int]] = []
        for key in extra_keys:
            if not isinstance(key, tuple | list) or len(key) not in (2, 4) or not isinstance(key[0], str):
                raise InvalidArgumentError(
                    f"extra_keys: expected (kind, value) or (kind, value, start, end) with a str kind, got {key!r}"
                )
            pair = encode(key[0]) + encode(key[1])
            if len(key) == 2:
                whole.add((b"K" + pair, 0))
                continue
            start, end = key[2], key[3]
            if not (hasattr(start, "__index__") and hasattr(end, "__index__") and 0 <= start < end):
                raise InvalidArgumentError(f"extra_keys: expected 0 <= start < end, got {start!r}, {end!r} in {key!r}")
            self.ranges.append((pair, int(start), int(end)))
        self.ranges.sort(key=lambda item: item[1])
        self._starts = [start for _, start, _ in self.ranges]
        self._ends = list(itertools.accumulate((end for _, _, end in self.ranges), max))  # the furthest so far
        self.whole: Extras = tuple(sorted(whole))
        self.whole_bytes = joined(self.whole)
        salt = set() if cache_salt is None else {(b"Z" + encode(cache_salt, "cache_salt"), 0)}
        self._first: Extras = tuple(sorted(whole | salt))

    def at(self, start: int, stop: int) -> Extras:
        """The encoded keys of the chunk at positions [start, stop)."""
        common = self.whole if start else self._first
        overlapping = []
        number = bisect.bisect_left(self._starts, stop)
        while number and self._ends[number - 1] > start:
            number -= 1
            pair, low, high = self.ranges[number]
            if high > start:
                part = encode(low - start) + encode(min(high, stop) - start)
                overlapping.append((b"R" + pair + part, max(low - start, 0)))
        return tuple(sorted({*common, *overlapping})) if overlapping else common


def joined(extras: Extras) -> bytes:
    return b"".join(pair for pair, _ in extras)


NO_KEYS = KeySet((), None)


class ChainHasher:
    """Extend chains of links over chunks of `chunk` tokens."""

    def __init__(self, hash_fn: str | HashFn, chunk: int) -> None:
        if not callable(hash_fn) and hash_fn != "sha256":
            raise InvalidArgumentError(f'hash_fn: expected "sha256" or a callable from bytes to bytes, got {hash_fn!r}')
        self._hash_fn = hash_fn if callable(hash_fn) else None
        self.is_sha256 = self._hash_fn is None
        self.chunk = chunk
        self.root = self._digest(b"pagedkv prefix 1" + struct.pack("<Q", chunk))

    def _digest(self, data: bytes) -> bytes:
        if self._hash_fn is None:
            return hashlib.sha256(data).digest()
        digest = self._hash_fn(data)
        if not isinstance(digest, bytes):
            raise InvalidArgumentError(f"hash_fn: expected it to return bytes, got {type(digest).__name__}")
        return digest

    def extend(self, chain: list[Link], tokens: TokenIds, keys: KeySet, num_chunks: int) -> None:
        """Append links until `chain`, which starts at the first chunk, covers `num_chunks` full chunks of `tokens`."""
        chain += self.grow(chain[-1] if chain else None, len(chain), tokens, keys, num_chunks)

    def grow(self, tip: Link | None, first: int, tokens: TokenIds, keys: KeySet, stop: int) -> list[Link]:
        """The links of chunks [first, stop), behind `tip`."""
        links: list[Link] = []
        if first >= stop:
            return links
        width = self.chunk * TOKEN_BYTES
        data = tokens.to_bytes(first * self.chunk, stop * self.chunk)
        sha256 = hashlib.sha256
        for low in range(0, len(data), width):
            chunk = data[low : low + width]
            extras, extra_bytes = keys.whole, keys.whole_bytes
            if keys.ranges or tip is None:
                start = first * self.chunk + low // TOKEN_BYTES
                extras = keys.at(start, start + self.chunk)
                extra_bytes = joined(extras)
            link = tip.next if tip else None
            if link is None or link.tokens != chunk or link.extras != extras:
                data_to_hash = (tip.hash if tip else self.root) + chunk + extra_bytes
                digest = sha256(data_to_hash).digest() if self.is_sha256 else self._digest(data_to_hash)
                link = Link(digest, tip, chunk, extras)
            links.append(link)
            tip = link
        return links


def tied(links: Iterable[Link | None]) -> list[tuple[Link, Link | None, Link | None]]:
    """Each of these links and of those before them, with its parent and its next one: what `tie` gives to copies."""
    found: dict[int, Link] = {}
    for link in links:
        while link is not None and id(link) not in found:
            found[id(link)] = link
            link = link.parent
    return [
        (link, link.parent, link.next if link.next is not None and id(link.next) in found else None)
        for link in found.values()
    ]


def tie(links: list[tuple[Link, Link | None, Link | None]]) -> None:
    for link, parent, following in links:
        link.parent, link.next = parent, following


def chain_of(link: Link | None, count: int = sys.maxsize) -> list[Link]:
    """A link and those before it, at most `count` of them, the first one first."""
    chain: list[Link] = []
    while link is not None and len(chain) < count:
        chain.append(link)
        link = link.parent
    chain.reverse()
    return chain


def same_prefix(a: Link | None, b: Link | None) -> bool:
    """Whether two links stand for equal content: the whole chain is compared, as hashes may collide."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.extras != b.extras:
            return False
        a, b = a.parent, b.parent
    return True


def adopt(chain: list[Link], number: int, link: Link) -> None:
    """Put `link`, equal to chain[number], and its ancestors in the place of the chain's own links.

    Later comparisons then end at once, by identity. The links that follow get the new parent.
    """
    above = link
    for after in range(number + 1, len(chain)):
        own = chain[after]
        chain[after] = above = Link(own.hash, above, own.tokens, own.extras)
    current: Link | None = link
    while current is not None and chain[number] is not current:
        chain[number] = current
        current = current.parent
        number -= 1


def common_tokens(link: Link, tokens: bytes, extras: Extras) -> int:
    """How many leading tokens of a chunk agree with `tokens` and see the same extra keys."""
    count = min(len(tokens), len(link.tokens)) // TOKEN_BYTES
    for _, position in set(extras) ^ set(link.extras):
        count = min(count, position)
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[: middle * TOKEN_BYTES] == link.tokens[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
