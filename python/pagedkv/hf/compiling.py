"""The compiled decode step of a patched model."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code

from ..tensor_parallel import mesh_of
from .cache import PagedCache
from .capturing import StepGraphs
from .identity import ModelWatch
from .kv_pool import Pool

# A decode step of SmolLM2-135M at batch 16 in bfloat16 took 37 ms on 2 cores with packed weights alone, and 31 with
# elementwise kernels of fewer than 8,192 elements in one thread (Inductor's 512 cost more in threads than they bring).
# Joined q, k, v and gate, up projections and a C++ instead of a Python wrapper are worth a sixth of generate.
_CPU_OPTIONS = {
    "freezing": True,
    "cpp.min_chunk_size": 8192,
    "cpp.enable_concat_linear": True,
    "cpp_wrapper": True,
}
_READ_IN_PLACE = ("writes", "values")  # of the model's identity, by a captured graph


class CompiledStep:
    """Calls the model through ``torch.compile``; unless options are given, on CPU with its weights frozen in, on CUDA
    captured and replayed.

    Freezing packs the weights for the matrix products: those of a step of SmolLM2-135M at batch 16 in bfloat16 took 11
    ms instead of 17, by themselves. No guard watches frozen weights or hooks, hence :meth:`follow`.
    """

    def __init__(
        self, model: torch.nn.Module, original_class: Any, watch: ModelWatch, options: dict[str, Any] | None
    ) -> None:
        self._watch = watch
        self._is_frozen = options is None and _can_freeze(model)
        self._identity = watch.inspect()

        def step(*args: Any, **kwargs: Any) -> Any:
            return original_class.__call__(model, *args, **kwargs)

        # compiled code is kept per code object: with one of its own, this model's is counted and dropped by itself
        self._code: CodeType = step.__code__.replace()
        own = FunctionType(self._code, step.__globals__, step.__name__, None, step.__closure__)
        self._call = torch.compile(own, **(options or {}))
        self._is_marked = False
        self._graphs: StepGraphs | None = None
        self._is_watched = False  # somebody wants to be called in every step

    def capture(self, cache_name: str, pool: Pool) -> None:
        """Replay steps over this pool as CUDA graphs."""
        self._graphs = StepGraphs(self._call, cache_name, pool)
        self._is_watched = self._watch.row_watchers() is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._graphs is not None and not self._is_watched and not args:
            return self._graphs(**kwargs)
        if not self._is_frozen:
            return self._call(*args, **kwargs)
        if not self._is_marked:
            self._is_marked = _mark_batch((*args, *kwargs.values()))
        with torch._inductor.config.patch(_CPU_OPTIONS):  # read while the call is traced and compiled
            return self._call(*args, **kwargs)

    def follow(self) -> None:
        """Compile anew, at the next call, if hooks changed, or anything that is frozen in."""
        identity, before = self._watch.look(), self._identity
        self._identity = identity
        if identity.hooks != before.hooks or (self._is_frozen and identity != before):
            self.clear()
        elif self._graphs is not None and identity.changes(before, ignored=_READ_IN_PLACE):
            self._graphs.clear()
        if self._graphs is not None:
            self._is_watched = self._watch.row_watchers() is not None

    def clear(self) -> None:
        """Drop what was compiled, packed weights included."""
        reset_code(self._code)
        self._is_marked = False
        if self._graphs is not None:
            self._graphs.clear()


def _can_freeze(model: torch.nn.Module) -> bool:
    """Its weights are on CPU, and no DTensors: freezing fails on those."""
    return mesh_of(model) is None and all(weight.device.type == "cpu" for weight in model.parameters())


def can_capture(model: torch.nn.Module) -> bool:
    """Its weights are on one CUDA device, and no ranks wait for one another."""
    devices = {weight.device for weight in model.parameters()}
    return mesh_of(model) is None and len(devices) == 1 and devices.pop().type == "cuda"


def _mark_batch(inputs: Sequence[Any]) -> bool:
    """Let what is traced next serve any batch size from 2 on; whether it will.

    Besides one graph less, it is what Inductor packs float32 weights for oneDNN by, and not for MKL: a step of
    SmolLM2-135M at batch 16 took 41 ms instead of 95 on an AMD EPYC.
    """
    state = next(value.state for value in inputs if isinstance(value, PagedCache))
    if state.batch < 2:
        return False
    for tensor in (*state.index_tensors(), *(value for value in inputs if isinstance(value, Tensor))):
        for dim, size in enumerate(tensor.shape):  # position_ids may be [sections, B, 1]
            if size == state.batch:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return True
