"""The device under test: its name, the type of its products, and what it is.

``PAGEDKV_GPU_DEVICE`` names another device than the current one. With ``PAGEDKV_REHEARSAL=1`` there is none: Triton's
interpreter works on CPU tensors, in float16, as it multiplies the bit patterns of bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

REHEARSAL = os.environ.get("PAGEDKV_REHEARSAL") == "1"
DEVICE = os.environ.get("PAGEDKV_GPU_DEVICE") or ("cpu" if REHEARSAL else "cuda")
DTYPE = torch.float16 if REHEARSAL else torch.bfloat16
_STATE = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu,mig.mode.current,ecc.mode.current"


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


def _said(*command: str) -> str:
    """What a tool prints, where it is there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "not known"


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
        "commit": _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        _STATE: _said("nvidia-smi", f"--query-gpu={_STATE}", "--format=csv,noheader"),
        "tools": {name: shutil.which(name) for name in ("gcc", "ncu", "compute-sanitizer")},
        "rehearsal": REHEARSAL,
    }
