"""Facts about this machine and its ceilings: sequential read and memcpy by all threads, torch.mm."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

READ_BYTES = 512 << 20


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiles read_ceiling.cpp for this processor."""
    target = Path(tempfile.mkdtemp()) / "read_ceiling.so"
    source = Path(__file__).with_name("read_ceiling.cpp")
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.read_all.restype = ctypes.c_float
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    library.copy_two.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_long, ctypes.c_int]
    return library


@functools.cache
def _read_buffer() -> torch.Tensor:
    return torch.ones(READ_BYTES // 4)


def read_all() -> None:
    """Reads 512 MB once, each thread its own half, third, ... of it."""
    _library().read_all(_read_buffer().data_ptr(), READ_BYTES, torch.get_num_threads())


def copy_two(dst: tuple[torch.Tensor, torch.Tensor], src: tuple[torch.Tensor, torch.Tensor]) -> None:
    """memcpy of two pairs of contiguous tensors of equal size, split over the threads."""
    pointers = [t.data_ptr() for pair in zip(dst, src, strict=True) for t in pair]
    _library().copy_two(*pointers, src[0].numel() * src[0].element_size(), torch.get_num_threads())


def matmul(dtype: torch.dtype) -> Callable[[], object]:
    """A product of 2048 x 2048 matrices: 2 * 2048^3 operations."""
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return lambda: torch.mm(a, b)


MATMUL_FLOPS = 2 * 2048**3


def facts() -> dict[str, object]:
    import pagedkv_ops

    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), model)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = huge.read_text().partition("[")[2].partition("]")[0] if huge.exists() else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": model,
        "threads": torch.get_num_threads(),
        "transparent huge pages": mode or "unknown",
        "kernels": pagedkv_ops.backends()["cpu"],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
