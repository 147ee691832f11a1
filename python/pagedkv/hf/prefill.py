"""Prefill without padding: the real tokens of all rows as one row of the model, and rows that are equal once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cache import PagedCache
from .layers import PagedLayer
from .tags import TAG

# with other arguments than these a model may do more than attend and work token by token
_PLAIN = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}


def can_pack(cache: PagedCache, cache_name: str, kwargs: dict[str, Any]) -> bool:
    """generate()'s prefill of a model whose layers all read blocks, with something to leave out."""
    ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    markers = list(mask.values()) if isinstance(mask, dict) else [mask]
    return (
        given <= _PLAIN | {cache_name}
        and all(type(layer) is PagedLayer for layer in cache.layers)
        and cache.is_compileable
        and ids is not None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
        and kwargs.get("logits_to_keep") == 1
        and all(hasattr(marker, TAG) for marker in markers)
        and cache.state.is_pending
        and cache.state.can_pack
    )


def call_packed(call: Callable[..., Any], cache: PagedCache, kwargs: dict[str, Any]) -> Any:
    """The forward on [1, T] real tokens; its logits as [B, 1, vocabulary], those of each row's last token."""
    ids, positions = kwargs["input_ids"], kwargs["position_ids"]
    tokens, last = (torch.from_numpy(index).to(ids.device) for index in cache.state.pack())
    packed = {
        **kwargs,
        "input_ids": ids.reshape(-1)[tokens][None],
        "position_ids": positions.expand_as(ids).reshape(-1)[tokens][None],
        "logits_to_keep": last,
    }
    out = call(**packed)
    out.logits = out.logits.transpose(0, 1)
    return out
