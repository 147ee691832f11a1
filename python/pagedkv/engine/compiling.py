"""torch.compile for the engine: one graph over any number of packed tokens, on CPU with frozen and packed weights."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_number = itertools.count().__next__

# Measured on SmolLM2-135M in bfloat16, 16 sequences: without these options a decode step takes 27 ms, with the q, k, v
# and the gate, up projections joined 25, with a C++ instead of a Python wrapper 22, with Inductor's own matrix products
# where they are faster than oneDNN's at the traced size 20.5; compilation takes 30 s at first and 100 s with all.
_CPU_OPTIONS = {
    "freezing": True,
    "cpp_wrapper": True,
    "cpp.enable_concat_linear": True,
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_report_choices_stats": False,  # no tables of the timings on the terminal
    "autotune_num_choices_displayed": 0,
}


def compiled(function: F, device: torch.device, is_sharded: bool = False) -> tuple[F, AbstractContextManager[Any]]:
    """The function, compiled at its first call, and a context for that call.

    Only sizes are checked before a compiled graph is used, not the model: looking at every module takes 1.2 ms of a
    step. Dynamo keeps graphs by code object, so the function gets one of its own: no other engine's graph can be taken.
    Weights that are sharded (DTensors) get none of the options for CPU: freezing and the C++ wrapper fail on them.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{_number()}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    result = torch.compile(own, fullgraph=True, options={"guard_filter_fn": _only_sizes})
    # freezing is read by Dynamo too, which does not see a compiled function's own options
    options = _CPU_OPTIONS if device.type == "cpu" and not is_sharded else {}
    return result, torch._inductor.config.patch(options)  # type: ignore[return-value]


def _only_sizes(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]
