"""Progress bars of the engine; rich is imported when one is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, shown: bool) -> Iterable[T]:
    """The items, with a bar that advances over them."""
    if not shown:
        return items
    from rich.progress import track as rich_track

    return rich_track(list(items), description)


@contextmanager
def generation_bar(total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Gives a function that sets the number of finished sequences and a line of figures."""
    if not shown:
        yield lambda finished, figures: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda finished, figures: bar.update(task, completed=finished, description=figures)
