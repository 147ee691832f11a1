"""Bridges to compilers and runtimes that need more than the registered ops; a module is imported at its first use."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("in_place", "torch_tensorrt"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
