"""The plan of a forward of a patched model: slots, masks, and the call that serves it.

A prefill is computed without padding: the real tokens of all rows as one row of the model, and equal rows once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import create_masks_for_generate

from . import reuse
from .cache import PagedCache, cache_argument
from .capturing import reads_blocks_only
from .handle import Patch
from .untraced import untraced


@untraced
def plan(
    model: Any, patch: Patch, cache: PagedCache, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Plan the forward that is about to run, whatever kind of mask it was given; how it shall be called."""
    state = cache.state
    ids = kwargs.get("input_ids", args[0] if args else None)
    inputs = kwargs.get("inputs_embeds") if ids is None else ids
    if inputs is None:
        return call
    if patch.pool.prefix_caching:
        reuse.follow(patch.watch, state)
        if patch.created is None:
            reuse.follow_call(patch.watch, patch.cache_name, state, inputs, args, kwargs)
    if state.rows is None and not any(layer.spec for layer in state.layers):
        patch.teach(model, cache)  # the caller made it
    state.token_ids = ids
    mask, asked, (batch, length) = kwargs.get("attention_mask"), state.asked, inputs.shape[:2]
    is_made = isinstance(mask, dict) or (mask is not None and mask.dim() != 2)
    if is_made and asked is not None and asked.size == (batch, length):  # by generate()
        state.plan(asked.mask, batch, length, asked.dense, writes_pending=True)
    else:
        # attention follows a dense mask that others make: columns are kept as they are, padding included
        dense = is_made or not patch.switches
        state.plan(None if dense else mask, batch, length, dense, writes_pending=True)
    if state.query_length == 1:
        return patch.compiled if patch.compiled is not None and cache.is_compileable else call
    if _can_pack(cache, patch.cache_name, kwargs) and patch.watch.row_watchers() is None:
        return lambda **packed: _call_packed(call, cache, packed)
    return call


@untraced
def make_traceable(model: Any, cache: PagedCache, kwargs: dict[str, Any]) -> None:
    """Make what depends on the cache's length before the compiled code runs, as generate() does for its own."""
    state = cache.state
    if not state.is_pending or not cache.is_compileable:
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    shape, device = (state.batch, state.query_length), model.get_input_embeddings().weight.device
    if positions is None and "position_ids" in inspect.signature(model.forward).parameters:
        positions = kwargs["position_ids"] = torch.arange(state.columns, state.columns + shape[1], device=device)[None]
    if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
        kwargs["attention_mask"] = make(
            config=model.config,
            inputs_embeds=torch.empty((*shape, 0), dtype=model.dtype, device=device),
            attention_mask=mask,
            position_ids=positions,
            **{cache_argument(model): cache},
        )


def _can_pack(cache: PagedCache, cache_name: str, kwargs: dict[str, Any]) -> bool:
    """generate()'s prefill of a model whose layers all read blocks, with something to leave out."""
    return (
        reads_blocks_only(cache, cache_name, kwargs)
        and kwargs["position_ids"].dim() == 2
        and kwargs.get("logits_to_keep") == 1
        and cache.state.can_pack
    )


def _call_packed(call: Callable[..., Any], cache: PagedCache, kwargs: dict[str, Any]) -> Any:
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
