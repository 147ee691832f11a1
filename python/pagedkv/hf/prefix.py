"""Reuse of prompts across calls of ``generate``: what they may depend on, and how a batch skips what is cached."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..tensor_parallel import local_tensor
from .cache import PagedCache
from .layers import PagedLayer

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


def weights_of(model: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """Differs once a parameter was written in place or replaced, but for writes through ``.data``."""
    with torch.no_grad():
        parts = [(local_tensor(parameter), parameter._version) for parameter in model.parameters()]
    return tuple((part.data_ptr(), part._version + version) for part, version in parts)


class PrefixKeys:
    """What enters the identity of a prefix besides its tokens: weights and active adapters."""

    def __init__(self) -> None:
        self._weights: tuple[tuple[int, int], ...] = ()
        self._generation = 0

    def clear(self) -> None:
        self._generation += 1

    def current(self, model: torch.nn.Module) -> list[tuple[str, Any]]:
        weights = weights_of(model)
        if weights != self._weights:
            self._weights = weights
            self._generation += 1
        # properties of adapter layers; a PreTrainedModel has methods of the same names
        layers = [m for m in model.modules() if isinstance(getattr(type(m), "disable_adapters", None), property)]
        adapters = sorted({str(layer.active_adapters) for layer in layers})
        off = sorted({str(layer.disable_adapters) for layer in layers})
        return [("weights", self._generation), ("adapters", adapters), ("disabled", off)]


def attach(model: Any, keys: PrefixKeys, cache: PagedCache, input_ids: Any, model_kwargs: dict[str, Any]) -> None:
    """Let a fresh cache begin with what is cached of its prompts.

    generate() cuts one number of columns from all rows: the smallest of (padding + cached tokens).
    """
    state = cache.state
    mask = model_kwargs.get("attention_mask")
    if state.seen or state.rows is not None or model_kwargs.get("inputs_embeds") is not None:
        return
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.dim() != 2 or mask.shape != input_ids.shape:
        return
    valid = mask.cpu().numpy().astype(bool)
    prompts = [row[real].tolist() for row, real in zip(input_ids.cpu().numpy(), valid, strict=True)]
    copies = state.copies if len(prompts) % state.copies == 0 else 1
    if any(prompts[row] != prompts[row // copies * copies] for row in range(len(prompts))):
        copies = 1
    state.copies = copies
    hits = state.start(len(prompts), copies, prompts, keys.current(model))
    padding = valid.argmax(1)
    columns = int((padding + hits).min())
    if columns:
        state.skip(valid[:, :columns])
