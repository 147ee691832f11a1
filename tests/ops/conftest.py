"""``run``: every test that takes it runs eagerly and inside a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


def _eager(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()  # public functions share code objects between tests, and their guards pile up
    return torch.compile(fn, fullgraph=True, dynamic=False)(*args, **kwargs)


@pytest.fixture(params=[_eager, _compiled], ids=["eager", "compiled"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, *args, **kwargs)``; as ``compiled`` a graph break is an error."""
    return request.param  # type: ignore[no-any-return]
