"""How attention recognises what came from a paged cache: an attribute on keys, values, masks and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

TAG = "_pagedkv"


class Columns(int):
    """A number of columns that knows the state of the cache which gave it: it comes to the mask function as is."""

    state: Any


class MaskTag:
    """What a mask marker stands for.

    Attributes:
        window: tokens that a query sees, itself included; None: unlimited.
        build: makes the dense mask of the current forward, for layers that attend densely after all.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.build: Callable[[], Tensor | None] = lambda: None
