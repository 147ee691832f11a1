"""Stand-ins for a device: Triton's interpreter behind the ops of CPU tensors, and what is used of ``torch.cuda``.

A rehearsal shows that every step runs and judges right; its times mean nothing.
"""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """In place of ``torch.cuda.CUDAGraph``: the recorded ops run again, and their results go where the first went."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        with torch.inference_mode():
            for function, args, options, results in self.calls:
                again = function(*args, **options)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Capture(TorchDispatchMode):
    """In place of ``torch.cuda.graph``."""

    def __init__(self, graph: Graph, **_: Any) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.graph.calls.append((function, args, kwargs or {}, results))
        return results


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return max((end.at - self.at) * 1e3, 1e-3)


_PROPERTIES = SimpleNamespace(
    name="none: a rehearsal on Triton's interpreter",
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=1 << 12,
)
_STANDINS: dict[str, Any] = {
    "CUDAGraph": Graph,
    "graph": Capture,
    "Event": Event,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "device_count": lambda: 1,
    "mem_get_info": lambda *_: (2 << 30, 4 << 30),
    "get_device_properties": lambda *_: _PROPERTIES,
}


def install() -> None:
    import pagedkv_ops  # noqa: F401  (registers the ops that are replaced below)
    from pagedkv_ops import _triton
    from pagedkv_ops.schema import NAMESPACE, SCHEMAS

    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that kernels are overridden is meant
        for name in SCHEMAS:
            if name != "swap_blocks":  # its two streams have no stand-in here
                library.impl(name, getattr(_triton, name), "CPU", allow_override=True)
    torch.cuda._pagedkv_rehearsal = library
    for name, standin in _STANDINS.items():
        setattr(torch.cuda, name, standin)
    for name in ("start", "stop"):
        setattr(torch.cuda.profiler, name, lambda: None)
