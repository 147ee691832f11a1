"""What ``torch.compile`` leaves to Python: a graph holds the forward of a model, not the planning before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.eval_frame import skip_code

Function = TypeVar("Function", bound=Callable[..., Any])
_NOT_PLANNED = (
    "PagedCache: the slots of a forward are planned before its compiled code runs, which the model does itself after "
    "pagedkv.patch(model), but not inside a function that is compiled with fullgraph=True"
)


def untraced(function: Function) -> Function:
    """A compiled caller breaks its graph here; with ``fullgraph=True`` it is refused with the reason."""
    return cast(Function, torch.compiler.disable(function, reason=_NOT_PLANNED))  # type: ignore[no-untyped-call]


def skipped(function: Function) -> Function:
    """Not compiled itself, what it calls is: with ``torch.compile(model)`` the graph begins inside."""
    skip_code(function.__code__)
    return function


@untraced
def break_graph() -> None:
    """Ends the graph of a function into which the caller is being inlined; the caller gets a frame of its own."""
