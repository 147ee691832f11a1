"""Reuse of prompts across calls: what they may depend on, and how a batch skips what is cached."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cache import PagedCache
from .identity import ModelWatch
from .paged_layers import PagedLayer
from .state import PagedState

logger = logging.getLogger(__name__)

_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")


def allowed(model: Any, cache: PagedCache) -> bool:
    """A token's keys and values depend on nothing but the tokens before it; else it is said why not."""
    reason = dependence(model, cache)
    if reason is not None:
        logger.warning("pagedkv: prefix caching is off for %s: %s", type(model).__name__, reason)
    return reason is None


def dependence(model: Any, cache: PagedCache) -> str | None:
    """Why a token's keys and values depend on more than the tokens before it and its position; None: they do not."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {str(value) for value in _values(rope, "rope_type") + _values(rope, "type")}
    if not all(
        (isinstance(layer, PagedLayer) and type(layer) is PagedLayer) or _is_dummy(layer) for layer in cache.layers
    ):
        return "it has recurrent or convolutional layers"
    if kinds & set(_BATCH_DEPENDENT_ROPE):
        return "its rotary embedding depends on the longest row of a batch"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    return None


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"


def _values(parameters: Any, name: str) -> list[Any]:
    if not isinstance(parameters, dict):
        return []
    found = [parameters[name]] if name in parameters else []
    return found + [item for value in parameters.values() for item in _values(value, name)]


# Inputs of a forward that change no keys and values but through positions, which are compared.
_COVERED = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


def _is_covered(kwargs: dict[str, Any], cache_name: str) -> bool:
    """There is no input that could change keys and values without a trace in tokens and positions."""
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    return given <= _COVERED | {cache_name}


def _follow_mask(positions: Tensor | None, mask: NDArray[np.bool_]) -> bool:
    """Real tokens of a mask [B, columns] stand where they are counted: [..., B, any] positions of the last columns."""
    expected = np.cumsum(mask, 1) - 1
    if positions is None:
        return True
    if positions.dim() < 2 or not 0 < positions.shape[-1] <= mask.shape[1]:
        return False
    last = slice(mask.shape[1] - positions.shape[-1], None)
    return bool(((positions.cpu().numpy() == expected[:, last]) | ~mask[:, last]).all())


def _mask_of(mask: Any, batch: int, columns: int) -> NDArray[np.bool_] | None:
    if mask is None:
        return np.ones((batch, columns), bool)
    if not isinstance(mask, Tensor) or mask.shape != (batch, columns):
        return None
    return mask.cpu().numpy().astype(bool)


def attach(watch: ModelWatch, cache_name: str, cache: PagedCache, ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Before the prefill of generate(): let a fresh cache begin with what is cached of its prompts.

    generate() cuts one number of columns from all rows: the smallest of (padding + cached tokens).
    """
    state, mask = cache.state, model_kwargs.get("attention_mask")
    is_fresh = state.rows is None and not state.seen
    valid = _mask_of(mask, len(ids), ids.shape[1] if mask is None else mask.shape[-1])
    _identify(watch, cache_name, state, valid, model_kwargs.get("position_ids"), model_kwargs)
    if valid is None or state.identity is None:
        return
    if is_fresh and valid.shape == ids.shape and watch.recorded(model_kwargs) is None:
        _begin(cache, ids.cpu().numpy(), valid)


def _identify(
    watch: ModelWatch,
    cache_name: str,
    state: PagedState,
    valid: NDArray[np.bool_] | None,
    positions: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Let a state publish nothing unless all that its keys depend on is in its identity."""
    identity = watch.look()
    if state.rows is None and not state.seen:
        state.identity = identity
    if not (
        valid is not None
        and identity.keys is not None
        and state.identity == identity
        and _is_covered(kwargs, cache_name)
        and _follow_mask(positions, valid)
    ):
        state.identity = None


def _begin(cache: PagedCache, ids: NDArray[np.int64], valid: NDArray[np.bool_]) -> None:
    state = cache.state
    prompts = [row[real].tolist() for row, real in zip(ids, valid, strict=True)]
    copies = state.copies if len(prompts) % state.copies == 0 else 1
    if any(prompts[row] != prompts[row // copies * copies] for row in range(len(prompts))):
        copies = 1
    state.copies = copies
    hits = state.start(len(prompts), copies, prompts)
    columns = int((valid.argmax(1) + hits).min())
    if columns:
        state.skip(valid[:, :columns])


def follow(watch: ModelWatch, state: PagedState) -> None:
    """In generate(): what is computed from here on is not published if the model has changed since the prefill."""
    if state.identity is not None and watch.look() != state.identity:
        state.identity = None


def follow_call(
    watch: ModelWatch, cache_name: str, state: PagedState, inputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The same for a forward that a user calls: all of its inputs are the user's."""
    columns, length = state.seen, inputs.shape[1]
    valid = _mask_of(kwargs.get("attention_mask"), len(inputs), columns + length)
    positions = kwargs.get("position_ids")
    if positions is None:  # the model counts columns
        positions = torch.arange(columns, columns + length)[None]
    _identify(watch, cache_name, state, valid, positions, kwargs)
    if len(args) > 1 or kwargs.get("cache_position") is not None:
        state.identity = None
