"""What transformers calls: the mask function, which gives small markers where blocks are read, and the attention."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .paged_layers import INDICES, PAGED, UNDECIDED
from .state import Asked, PagedState
from .tags import TAG, MaskTag
from .untraced import untraced

logger = logging.getLogger(__name__)

NAME = "pagedkv"
OTHER = -1  # a mask that is more than causal and windowed
# arguments that do not change the result of attention over a causal, possibly windowed, mask
_HARMLESS = {
    "cache",
    "past_key_values",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "sliding_window",  # the mask has it
    "layer_idx",
}


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
def paged_mask(**arguments: Any) -> Tensor | None:
    """A marker where a PagedCache said how many keys there are (:class:`Columns`); the dense mask elsewhere.

    arguments: those of transformers' mask functions, which it gives by their names.
    """
    config, attention_mask = arguments.get("config"), arguments.get("attention_mask")
    batch, length, columns = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    build = partial(ALL_MASK_ATTENTION_FUNCTIONS[dense_implementation(config)], **arguments)
    state: PagedState | None = getattr(columns, "state", None)
    if state is None:
        _warn_once(config)
    if state is None or arguments.get("kv_offset") or columns != state.seen + length:
        return build()  # type: ignore[no-any-return]
    # whoever wants the weights of attention gets the model's own
    wants_weights = getattr(config, "output_attentions", False)
    window = OTHER if wants_weights else mask_window(arguments.get("mask_function", causal_mask_function))
    state.ask(Asked(attention_mask, batch, length, window == OTHER))
    if window == OTHER:
        return build()  # type: ignore[no-any-return]
    marker = state.pool.marker(window, torch.device(arguments.get("device", "cpu")))
    getattr(marker, TAG).build = build
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


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """No argument that asks for more than attention over blocks gives: weights, a tensor or a number not known."""
    if kwargs.get("output_attentions"):
        return False
    return all(
        name in _HARMLESS or value is None or not isinstance(value, Tensor | float | tuple | list)
        for name, value in kwargs.items()
    )


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface. query: [B, Hq, L, D]; key and value as the cache returned them.

    kwargs: those of the forward, among them what an engine's layers read (:data:`INDICES`).

    Returns:
        [B, L, Hq, Dv], and the weights where the model's own attention gives them.
    """
    indices = {name: kwargs.pop(name) for name in INDICES if name in kwargs}
    layer: Any = getattr(key, TAG, None)
    mask = _mask_tag(attention_mask)
    untouched = layer is not None and mask is not None and getattr(value, TAG, None) is layer
    if untouched and is_causal is not False and not dropout and _is_plain(kwargs):
        if layer.mode == UNDECIDED:
            layer.mode = PAGED
        window = mask.window  # type: ignore[union-attr]
        if window != layer.sliding_window:
            # such a model sees what its own cache happens to keep
            raise NotImplementedError(
                f"pagedkv: a mask of window {window} over a cache of window {layer.sliding_window}"
            )
        options = {"scale": scaling, "window_left": -1 if window is None else window - 1, "softcap": softcap or 0.0}
        return layer.attend(query, key, value, indices, sinks=s_aux, **options), None
    if layer is not None and layer.mode == PAGED:
        raise NotImplementedError(
            f"pagedkv: {type(module).__name__} was served from blocks and now asks for attention that they do not "
            "give (its weights, a mask or an argument of its own, or dropout); use pagedkv.unpatch(model) for this call"
        )
    optional = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "is_causal": is_causal}
    kwargs.update({name: value for name, value in optional.items() if value is not None})
    dense_mask = attention_mask if mask is None else mask.build()
    return _dense(module, query, key, value, dense_mask, dropout=dropout, **kwargs)


def _mask_tag(mask: Tensor | None) -> MaskTag | None:
    """The tag of a marker, also of one that was sliced to the last queries or to the keys, which leaves it as it is."""
    tag: MaskTag | None = getattr(mask, TAG, None)
    if tag is None and mask is not None and mask.shape == (1, 1, 1, 1) and mask._base is not None:
        tag = getattr(mask._base, TAG, None)
    return tag


def _dense(module: torch.nn.Module, *tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the model would run without this library: its previous implementation, or its own eager one."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = dense_implementation(getattr(module, "config", None))
    if own is None and name == "eager":
        raise NotImplementedError(f"pagedkv: {type(module).__module__} has no eager_attention_forward to fall back to")
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
    return attend(module, *tensors, **kwargs)  # type: ignore[no-any-return]
