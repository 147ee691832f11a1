"""The compiled decode step of a patched model."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from .prefix import weights_of

# Elements per thread of an elementwise kernel. At Inductor's 512 threads cost more than they bring: a decode step of
# SmolLM2-135M at batch 16 in bfloat16 took 37 ms on 2 cores, with this 31.
_MIN_CHUNK = 8192


class CompiledStep:
    """Calls the model through ``torch.compile``; on CPU, unless options are given, with its weights frozen in.

    Freezing packs the weights for the matrix products: those of a step of SmolLM2-135M at batch 16 in bfloat16 took 11
    ms instead of 17, by themselves. No guard watches frozen weights, hence :meth:`follow_weights`.
    """

    def __init__(self, model: torch.nn.Module, original_class: Any, options: dict[str, Any] | None) -> None:
        self._model = model
        self._is_frozen = options is None and all(weight.device.type == "cpu" for weight in model.parameters())
        self._weights = weights_of(model) if self._is_frozen else ()

        def step(*args: Any, **kwargs: Any) -> Any:
            return original_class.__call__(model, *args, **kwargs)

        # compiled code is kept per code object: with one of its own, this model's is counted and dropped by itself
        self._code: CodeType = step.__code__.replace()
        own = FunctionType(self._code, step.__globals__, step.__name__, None, step.__closure__)
        if self._is_frozen:
            options = {"options": {"cpp.min_chunk_size": _MIN_CHUNK}}
        self._call = torch.compile(own, **(options or {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_frozen:
            return self._call(*args, **kwargs)
        with torch._inductor.config.patch(freezing=True):  # read while the call is traced
            return self._call(*args, **kwargs)

    def follow_weights(self) -> None:
        """Compile anew, at the next call, if weights changed that are frozen in."""
        if self._is_frozen and (weights := weights_of(self._model)) != self._weights:
            self._weights = weights
            self.clear()

    def clear(self) -> None:
        """Drop what was compiled, packed weights included."""
        reset_code(self._code)
