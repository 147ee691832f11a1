"""Which models blocks can not serve, as far as it is known without running them, and the words for it."""

from __future__ import annotations

import traceback
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule
from transformers import PreTrainedModel

from ..tensor_parallel import split_kv_heads
from .cache import layer_kinds
from .identity import hook_dicts


class UnsupportedModelError(NotImplementedError):
    """A model that blocks can not serve; the message says why. It is left as it was."""


def refuse(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"pagedkv: {type(model).__name__} can not be served from blocks: {reason}")


def failed(model: PreTrainedModel, error: Exception, words: str) -> UnsupportedModelError:
    """The refusal of a model whose short generation ended with an error; names the hook that raised it, if one did."""
    text = f"{type(error).__name__}: {error}"
    ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for hook in (hook for hooks in hook_dicts(model.modules()) for hook in hooks.values()):
        function = getattr(hook, "func", hook)  # of a functools.partial
        if {getattr(function, "__code__", None), getattr(type(function).__call__, "__code__", None)} & ran:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return UnsupportedModelError(
                f"pagedkv: the hook {name} of {type(model).__name__} raised {text} in the short generation, of one and "
                "of two rows, that a model is accepted by; register it after that"
            )
    return refuse(model, f"{words} ({text})")


def base_model(model: Any) -> Any:
    """The transformers model inside compiled modules and adapter models, in any order; anything else as it is."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            break
    return model


def check_model(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModelError` for what is known without running the model."""
    config = model.config
    if not hasattr(model, "generate"):
        raise refuse(model, "it has no generate()")
    if config.is_encoder_decoder:
        raise refuse(model, "it is an encoder-decoder model")
    if not model._supports_default_dynamic_cache():
        raise refuse(model, "it keeps a cache of its own kind")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise refuse(model, "its weights are on the meta device")
    split = split_kv_heads(model)
    if split is not None:
        reason = f"its {split[0]} KV heads can not be divided evenly among {split[1]} tensor parallel ranks"
        raise refuse(model, f"{reason}, and transformers gives no rank a copy")
    try:
        kinds = layer_kinds(config)
    except NotImplementedError as error:
        raise refuse(model, str(error)) from None
    if all(kind in ("linear_attention", "conv", "dummy") for kind, _ in kinds):
        raise refuse(model, "it has no attention layer")


def check_inputs_are_ids(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` for PEFT methods that put vectors or keys of their own before the prompt."""
    wrapper = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", model)
    config: Any = getattr(wrapper, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise refuse(wrapper, f"{config.peft_type.value} puts vectors before the prompt that are no tokens")
