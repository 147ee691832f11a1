"""``kernels``: the Triton ops, interpreted on CPU tensors in a process of their own (or on a GPU, see ``worker``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .worker import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")
    worker = Kernels()
    yield worker
    worker.close()
