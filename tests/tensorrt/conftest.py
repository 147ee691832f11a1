"""Torch-TensorRT on a machine without a GPU: real lowering and partitioning, engines stay PyTorch submodules.

Only the driver queries that lowering makes are stubbed. PAGEDKV_REQUIRE_TENSORRT=1 turns a missing torch_tensorrt into
failures: the environment that is made for these tests must not pass by skipping them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_INSTALLED = importlib.util.find_spec("torch_tensorrt") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _INSTALLED or os.environ.get("PAGEDKV_REQUIRE_TENSORRT") == "1":
        return
    reason = "torch_tensorrt is not installed here; CI has an environment of its own for it"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def torch_tensorrt_without_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
            patch.setattr(torch.cuda, "current_device", lambda: 0)
        import torch_tensorrt  # noqa: F401

        logging.getLogger("torch_tensorrt").setLevel(logging.ERROR)
        yield


@pytest.fixture
def installed(torch_tensorrt_without_gpu: None) -> Iterator[None]:
    """Paged writes are kept inside this test only, so that stock behaviour can be shown beside it."""
    from pagedkv.integrations import torch_tensorrt as integration

    torch._dynamo.reset()
    integration.install()
    yield
    integration.uninstall()
