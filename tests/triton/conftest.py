"""``interpreter``: the Triton ops on CPU tensors, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .worker import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")
    worker = Interpreter()
    yield worker
    worker.close()
