"""``kernels``: the Triton ops, interpreted on CPU tensors in a process of their own (or on a GPU, see ``worker``).

``compiler``: a process that compiles kernels anew, for GPUs that are not there.
"""

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


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """With an empty cache: what an earlier run compiled can not hide a failure."""
    worker = Kernels(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    yield worker
    worker.close()
