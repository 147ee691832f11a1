"""``compiler``: a process that compiles kernels anew, for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton.worker import Kernels


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """With an empty cache: what an earlier run compiled can not hide a failure."""
    worker = Kernels(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    yield worker
    worker.close()
