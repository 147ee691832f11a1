"""Token ids: what callers give, and how a sequence keeps them."""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any

from pagedkv.errors import InvalidArgumentError

TOKEN_BYTES = 8
_SIGN_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0
_NOT_IDS = (bool, str, bytes, bytearray, set, frozenset, dict)  # counts or sequences to Python, but no token ids
# A fork copies this many ids rather than making a piece of them: a piece costs 200 bytes and a step of every search.
_MIN_PIECE = 256


def pack_tokens(token_ids: Any, name: str = "token_ids") -> array[int] | int:
    """Token ids as an array of their own; a count (ids unknown) is given back as it is.

    A scalar of numpy or torch is refused: it could be an id or a count.
    """
    if hasattr(token_ids, "tolist"):
        given, token_ids = token_ids, token_ids.tolist()
        if not isinstance(token_ids, list):
            raise InvalidArgumentError(
                f"{name}: expected a sequence of ints, or an int as a count, got {given!r}: write [{token_ids}] for "
                "one token"
            )
    if isinstance(token_ids, int) and not isinstance(token_ids, bool):
        if token_ids < 0:
            raise InvalidArgumentError(f"{name}: expected ids or a count of at least 0, got {token_ids}")
        return token_ids
    if type(token_ids) is not list and isinstance(token_ids, _NOT_IDS):
        raise InvalidArgumentError(f"{name}: expected a sequence of ints, or a count, got {type(token_ids).__name__}")
    try:
        if len(token_ids) and isinstance(
            token_ids[0], bool
        ):  # a mask: to look at all would take twice as long as packing
            raise InvalidArgumentError(f"{name}: expected a sequence of ints, got bools")
        # half the time of array("q", token_ids)
        packed = struct.pack(f"{len(token_ids)}q", *token_ids)
    except (TypeError, struct.error) as error:
        raise InvalidArgumentError(f"{name}: expected a sequence of 64-bit ints, or a count ({error})") from None
    if not packed[_SIGN_BYTE::TOKEN_BYTES].isascii():  # a sign bit is set; min() would take as long as packing
        raise InvalidArgumentError(f"{name}: expected ids of at least 0, got {min(token_ids)}")
    tokens = array("q")
    tokens.frombytes(packed)
    return tokens


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The ids that `TokenIds.to_bytes` packed."""
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}q", data)


class TokenIds:
    """The ids of a sequence's leading tokens. Forks share them: pieces that nobody changes, then a tail of its own.

    tail: the ids behind the pieces; `tail.append` adds one.
    """

    __slots__ = ("_num_frozen", "_pieces", "tail")

    def __init__(
        self, tail: array[int] | None = None, pieces: list[tuple[int, array[int]]] | None = None, num_frozen: int = 0
    ) -> None:
        self._pieces = pieces or []  # (position of its first id, ids); the next one may cut it
        self._num_frozen = num_frozen
        self.tail: array[int] = array("q") if tail is None else tail

    def __len__(self) -> int:
        return self._num_frozen + len(self.tail)

    def fork(self, length: int) -> TokenIds:
        """The first `length` ids once more."""
        if len(self.tail) >= _MIN_PIECE:
            self._pieces.append((self._num_frozen, self.tail))
            self._num_frozen += len(self.tail)
            self.tail = array("q")
        child = TokenIds(self.tail[:], self._pieces[:], self._num_frozen)
        if length < len(self):
            child.cut(length)
        return child

    def cut(self, length: int) -> None:
        """Forget the ids past `length`."""
        if length < self._num_frozen:
            while self._pieces and self._pieces[-1][0] >= length:
                self._pieces.pop()
            self._num_frozen = length
        del self.tail[max(0, length - self._num_frozen) :]

    def part(self, start: int, stop: int) -> array[int]:
        """Ids [start, stop), in time of their number."""
        end = self._num_frozen
        parts = [self.tail[max(0, start - end) : max(0, stop - end)]]
        for first, piece in reversed(self._pieces):
            if end <= start:
                break
            parts.append(piece[max(0, start - first) : max(0, min(stop, end) - first)])
            end = first
        joined = parts.pop()
        for piece in reversed(parts):
            joined += piece
        return joined

    def to_bytes(self, start: int, stop: int) -> bytes:
        """Ids [start, stop) as little-endian int64."""
        first = self._num_frozen
        part = self.tail[start - first : stop - first] if start >= first else self.part(start, stop)
        if sys.byteorder == "big":
            part.byteswap()
        return part.tobytes()
