"""The mask function: plain causal and sliding masks become a small marker, since the kernels know them by numbers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from .state import Asked, PagedState
from .tags import TAG
from .tracing import untraced

logger = logging.getLogger(__name__)

NAME = "pagedkv"
OTHER = -1  # a mask that is more than causal and windowed


def mask_window(mask_function: Callable[..., Any]) -> int | None:
    """The window of a causal mask function, None for unlimited, OTHER for any other kind."""
    if mask_function is causal_mask_function:
        return None
    parts = _free_variable(mask_function, "and_mask", "mask_functions")
    if parts is None or len(parts) != 2 or parts[1] is not causal_mask_function:
        return OTHER
    window = _free_variable(parts[0], "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
    return window if isinstance(window, int) else OTHER


def _free_variable(function: Callable[..., Any], qualname: str, variable: str) -> Any:
    if not getattr(function, "__qualname__", "").endswith(qualname) or function.__closure__ is None:
        return None
    values = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return values[variable].cell_contents if variable in values else None


@untraced
def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """A marker where a PagedCache said how many keys there are (:class:`Columns`); the dense mask elsewhere."""
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        "config": config,
        **kwargs,
    }
    dense = ALL_MASK_ATTENTION_FUNCTIONS[dense_implementation(config)]
    state: PagedState | None = getattr(kv_length, "state", None)
    if state is None:
        _warn_once(config)
    if state is None or kv_offset or kv_length != state.seen + q_length:
        return dense(**arguments)  # type: ignore[no-any-return]
    # whoever wants the weights of attention gets the model's own
    window = OTHER if getattr(config, "output_attentions", False) else mask_window(mask_function)
    state.ask(Asked(attention_mask, batch_size, q_length, window == OTHER))
    if window == OTHER:
        return dense(**arguments)  # type: ignore[no-any-return]
    marker = state.pool.marker(window, torch.device(device))
    getattr(marker, TAG).build = lambda: dense(**arguments)
    return marker


_warned = False


def _warn_once(config: Any) -> None:
    global _warned
    if not _warned and id(config) not in _dense_by_config:
        _warned = True
        logger.warning(
            'attn_implementation="pagedkv" without a PagedCache: attention is the model\'s own dense one. Pass a '
            "pagedkv.PagedCache(model.config, ...) as the cache, or use pagedkv.patch(model)"
        )


_dense_by_config: dict[int, str] = {}


def set_dense_implementation(config: Any, name: str) -> None:
    """Remember the attention that a config's model had before it was patched."""
    if id(config) not in _dense_by_config:
        weakref.finalize(config, _dense_by_config.pop, id(config), None)
    _dense_by_config[id(config)] = name


def dense_implementation(config: Any) -> str:
    """The library's attention that stands in where blocks are not read; else the model's own eager one."""
    return _dense_by_config.get(id(config), "eager")
