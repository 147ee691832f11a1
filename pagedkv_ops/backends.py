"""Attaches an implementation to each device: C++ kernels on CPU, Triton on CUDA, the reference where asked for.

``PAGEDKV_CPU=reference`` selects the readable reference on CPU, for debugging and for machines without the extension.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import reference
from .registration import is_first_import, written
from .schema import NAMESPACE, SCHEMAS

_namespace = getattr(torch.ops, NAMESPACE)
_EXTENSION = Path(__file__).parent / "_C.abi3.so"


def _attach_reference() -> str:
    for name in SCHEMAS:
        _namespace._library.impl(name, getattr(reference, name), "CPU")
    return "reference"


def _attach_extension() -> str:
    torch.ops.load_library(_EXTENSION)  # type: ignore[no-untyped-call]
    extension = ctypes.CDLL(str(_EXTENSION))
    text = ctypes.c_char_p()
    failed = extension.pagedkv_cpu_isa(ctypes.byref(text))
    isa = (text.value or b"").decode()
    if failed:
        raise RuntimeError(isa)
    return f"c++ ({isa})"


def _attach_cpu() -> str:
    choice = os.environ.get("PAGEDKV_CPU", "c++")
    if choice == "reference":
        return _attach_reference()
    if choice != "c++":
        raise RuntimeError(f"PAGEDKV_CPU must be c++ or reference, got {choice}")
    if not _EXTENSION.exists():
        raise ImportError(
            f"pagedkv_ops: the compiled extension {_EXTENSION.name} is missing; build it with "
            "`pip install --no-build-isolation -e .`, or set PAGEDKV_CPU=reference for the slow readable ops"
        )
    return _attach_extension()


def missing_for_cuda() -> str | None:
    """What the Triton kernels lack on this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'pagedkv[triton]')"
    return None


@functools.cache
def _launcher(name: str) -> Callable[..., Any]:
    """Triton is imported at the first CUDA call: it costs 0.4 s and may be broken where nothing needs it."""
    missing = missing_for_cuda()
    if missing is not None:
        raise RuntimeError(f"{name}: no CUDA implementation: {missing}")
    from . import _triton

    launcher: Callable[..., Any] = getattr(_triton, name)
    return launcher


def _cuda_op(name: str, *args: Any, **kwargs: Any) -> Any:
    launcher = _launcher(name)
    if torch.is_inference_mode_enabled():  # the autograd guard, which counts otherwise, did not run
        torch._C._increment_version(written(name)(args))
    return launcher(*args, **kwargs)


def _attach_cuda() -> None:
    for name in SCHEMAS:
        _namespace._library.impl(name, functools.partial(_cuda_op, name), "CUDA")


if is_first_import:
    _namespace._cpu_backend = _attach_cpu()
    _attach_cuda()


def backends() -> dict[str, str]:
    """The implementation behind each device type, or why there is none.

    >>> import pagedkv_ops
    >>> sorted(pagedkv_ops.backends())
    ['cpu', 'cuda']
    """
    missing = missing_for_cuda()
    cuda = f"unavailable: {missing}" if missing else "triton"
    if not missing and not torch.cuda.is_available():
        cuda = "unavailable: no CUDA device is visible to torch"
    return {"cpu": _namespace._cpu_backend, "cuda": cuda}
