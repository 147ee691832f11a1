"""The device under test: its name, the type of its products, and what it is.

``PAGEDKV_GPU_DEVICE`` names another device than the current one. With ``PAGEDKV_REHEARSAL=1`` there is none: Triton's
interpreter works on CPU tensors, in float16, as it multiplies the bit patterns of bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

REHEARSAL = os.environ.get("PAGEDKV_REHEARSAL") == "1"
DEVICE = os.environ.get("PAGEDKV_GPU_DEVICE") or ("cpu" if REHEARSAL else "cuda")
DTYPE = torch.float16 if REHEARSAL else torch.bfloat16


def prepare() -> None:
    """Call it first in every process that uses the device."""
    if REHEARSAL:
        from . import rehearsal

        rehearsal.install()


def properties() -> Any:
    return torch.cuda.get_device_properties(torch.device(DEVICE).index or 0)


def is_lost() -> bool:
    """Whether an earlier error has left the process without its device: every later call would fail."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def facts() -> dict[str, Any]:
    import pagedkv_ops

    device = properties()
    free, total = torch.cuda.mem_get_info()
    return {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "devices": torch.cuda.device_count(),
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "free_gb": round(free / 1e9, 1),
        "total_gb": round(total / 1e9, 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "transformers", "numpy", "pytest")},
        "backends": pagedkv_ops.backends(),
        "rehearsal": REHEARSAL,
    }
