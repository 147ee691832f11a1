"""torch.compile for the engine: one graph over any number of packed tokens, on CPU with frozen weights."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
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


def compiled(function: F, is_frozen: bool) -> tuple[F, AbstractContextManager[Any]]:
    """The function, compiled at its first call, and a context for that call.

    Only its arguments are looked at before a compiled graph is used, not the model: looking at every module takes 1.2
    ms of a step. Dynamo keeps graphs by code object, so the function gets one of its own: no other engine's graph can
    be taken. Sharded weights (DTensors) must not be frozen: freezing and the C++ wrapper fail on them.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{_number()}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    arguments = frozenset(code.co_varnames[: code.co_argcount])
    result = torch.compile(own, fullgraph=True, options={"guard_filter_fn": partial(_guards_of, arguments)})
    # freezing is read by Dynamo too, which does not see a compiled function's own options
    options = _CPU_OPTIONS if is_frozen else {}
    return result, torch._inductor.config.patch(options)  # type: ignore[return-value]


def _guards_of(arguments: frozenset[str], guards: Sequence[Any]) -> list[bool]:
    """The sizes that may vary (SHAPE_ENV), and those of tensors in arguments that may not: 0 and 1 are constants."""

    def is_argument(name: str) -> bool:
        return re.split(r"\W", name, maxsplit=1)[0] in arguments  # of indices['seq_lens'][0]: indices

    return [
        guard.guard_type == "SHAPE_ENV" or (guard.guard_type == "TENSOR_MATCH" and is_argument(guard.name))
        for guard in guards
    ]
