"""``kernels``: the Triton ops, interpreted on CPU tensors in a process of their own (or on a GPU, see ``worker``).

``driver``: Triton's own launch path in this process, up to a driver that is faked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .worker import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")
    worker = Kernels()
    yield worker
    worker.close()


@pytest.fixture
def driver() -> Iterator[Any]:
    from pagedkv_ops._triton.replay import forget
    from tools.fake_driver import installed

    with installed() as driver:
        forget()
        yield driver
    forget()
