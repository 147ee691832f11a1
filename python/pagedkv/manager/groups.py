"""Attention groups: layers that keep the same positions, and which positions those are."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import InvalidArgumentError, integer, listed, refused

_MOST_EXCESS = 1.1  # of the layers that a window's groups hold room for
MAX_BLOCK_SIZE = 2**31 - 1  # the kernels count a sequence's keys in 32 bits


@dataclass(frozen=True)
class GroupSpec:
    """What a group of layers attends to.

    Args:
        kind: "full"; "sliding": the last `window` tokens, the token itself included; "chunked": the tokens of its own
            chunk of `window` tokens.
        window: None for "full".
        block_size: tokens per block, None for the manager's; groups share one pool, so their blocks have equal bytes.

    >>> GroupSpec("sliding", window=1024)
    GroupSpec(kind='sliding', window=1024, block_size=None)
    """

    kind: str = "full"
    window: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("full", "sliding", "chunked"):
            raise InvalidArgumentError(f'GroupSpec.kind: expected "full", "sliding" or "chunked", got {self.kind!r}')
        if (self.window is None) != (self.kind == "full"):
            raise InvalidArgumentError(
                f"GroupSpec.window: expected None for full and at least 1 otherwise, got {self.window} for {self.kind}"
            )
        for name, maximum in (("window", None), ("block_size", MAX_BLOCK_SIZE)):
            if getattr(self, name) is not None:
                integer(f"GroupSpec.{name}", getattr(self, name), 1, maximum=maximum)


def group_layers(windows: Sequence[int | None]) -> list[list[int]]:
    """Cut the layers of a model into groups of about equal size.

    A block is as large as the largest group needs it, whichever group it serves: in one group per window the 29
    sliding layers of a gemma-3-4b would make each block of its 5 full layers six times as large as these need it.

    Args:
        windows: of each layer, in tokens; None: unlimited.

    Returns:
        Indices of layers for each group, layers of one window together: groups of the largest size with which no window
        gets room for more than 1.1 times its layers.

    >>> group_layers([512, 512, 512, 512, None, 512, 512, 512, 512, None])
    [[0, 1], [2, 3], [5, 6], [7, 8], [4, 9]]
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    counts = [len(same) for same in layers.values()]
    sizes = range(min(counts, default=1), 0, -1)
    size = next(size for size in sizes if all(-(-count // size) * size <= _MOST_EXCESS * count for count in counts))
    return [same[start : start + size] for same in layers.values() for start in range(0, len(same), size)]


class Group:
    """A spec with its block size settled and its arithmetic."""

    __slots__ = ("block_size", "chunks_per_block", "is_full", "kind", "suffix", "window")

    def __init__(self, spec: GroupSpec, block_size: int, number: int = 0) -> None:
        self.kind = spec.kind
        self.window = spec.window or 0
        self.is_full = spec.kind == "full"
        self.block_size = spec.block_size or block_size
        self.chunks_per_block = 1  # hash chunks, set by resolve_groups
        self.suffix = number.to_bytes(4, "little") if number else b""  # of its hashes, which groups share otherwise

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position`, or at any later one, sees."""
        if self.is_full:
            return 0
        if self.kind == "sliding":
            return max(0, position - self.window + 1)
        return position // self.window * self.window

    def num_released(self, num_computed: int) -> int:
        """Leading blocks that no token at `num_computed` or later sees."""
        return self.first_visible(num_computed) // self.block_size

    def next_release(self, num_released: int) -> int:
        """The computed tokens at which more than `num_released` leading blocks are out of sight."""
        if self.is_full:
            return sys.maxsize
        first = (num_released + 1) * self.block_size
        return first + self.window - 1 if self.kind == "sliding" else -(-first // self.window) * self.window

    def first_needed(self, num_blocks: int) -> int:
        """The first block that a hit of `num_blocks` blocks needs.

        The last one is always needed, even where no later token sees it: it proves that the prefix was computed.
        """
        return min(self.first_visible(num_blocks * self.block_size) // self.block_size, num_blocks - 1)


def resolve_groups(specs: Any, block_size: int) -> tuple[list[Group], int, int]:
    """Groups, the tokens hashed at once (greatest common divisor), the granularity of hits (least common multiple)."""
    specs = listed("groups", specs, "a sequence of GroupSpecs")
    if not specs:
        raise InvalidArgumentError("groups: expected at least one GroupSpec, got none")
    for spec in specs:
        if not isinstance(spec, GroupSpec):
            raise refused("groups", "GroupSpecs", spec)
    groups = [Group(spec, block_size, number) for number, spec in enumerate(specs)]
    sizes = [group.block_size for group in groups]
    chunk = math.gcd(*sizes)
    for group in groups:
        group.chunks_per_block = group.block_size // chunk
    return groups, chunk, math.lcm(*sizes)
