"""Progress bars of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def track(items: Sequence[T], description: str, shown: bool) -> Any:
    """The items, with a bar that advances over them."""
    return tqdm(items, description, disable=not shown)


def generation_bar(total: int, shown: bool) -> Any:
    """A bar of finished sequences; a context manager."""
    return tqdm(total=total, disable=not shown, unit="seq", bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed} {desc}")
