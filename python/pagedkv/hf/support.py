"""Which models blocks can serve: what is known beforehand, and a short run against the model's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..tensor_parallel import split_kv_heads
from .cache import layer_kinds
from .layers import PAGED, PagedLayer

if TYPE_CHECKING:
    from .cache import PagedCache


class UnsupportedModelError(NotImplementedError):
    """A model that blocks can not serve; the message says why. It is left as it was."""


def refuse(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"pagedkv: {type(model).__name__} can not be served from blocks: {reason}")


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


def text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The config objects that the text model's attention layers read: usually one, sometimes copies."""
    text = model.config.get_text_config(decoder=True)
    configs = [text]
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is type(text) and not any(config is known for known in configs):
            configs.append(config)
    return configs


def uses_interface(model: PreTrainedModel, configs: list[PreTrainedConfig]) -> bool:
    """The attention layers look their function up by ``config._attn_implementation``."""
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel) and any(m.config is c for c in configs)]
    return bool(owners) and all(type(owner)._can_set_attn_implementation() for owner in owners)


def compare(model: PreTrainedModel, native: Any, paged: Any, cache: PagedCache) -> None:
    """Raise :class:`UnsupportedModelError` where the logits of two short runs differ by more than rounding."""
    if not any(isinstance(layer, PagedLayer) and layer.is_initialized for layer in cache.layers):
        raise refuse(model, "its forward does not write to the cache it is given")
    exact = {model.dtype, cache.pool.kv_dtype or model.dtype} <= {torch.float32, torch.float64}
    limit = 1e-3 if exact else 0.1
    same_so_far = True
    for step, (expected, got) in enumerate(zip(native.logits, paged.logits, strict=True)):
        expected, got = expected.double(), got.double()
        error = float((expected - got).norm() / expected.norm().clamp_min(1e-9))
        if same_so_far and not error < limit:
            raise refuse(model, f"its logits differ from the model's own by {error:.1e} (relative) at step {step}")
        same_so_far = same_so_far and bool((expected.argmax(-1) == got.argmax(-1)).all())


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Two rows of a few tokens, one of them padded on the left."""
    vocabulary = model.get_input_embeddings().num_embeddings
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(12, device=device).reshape(2, 6) * 7 + 5) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "generation_config": probe_generation_config()}


def probe_generation_config() -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
    )


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """No dropout inside; every module's mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def modes(cache: PagedCache) -> list[str]:
    """Per layer: paged, gathered, or the name of the library's own layer class."""
    return [
        ("paged" if layer.mode == PAGED else "gathered") if isinstance(layer, PagedLayer) else type(layer).__name__
        for layer in cache.layers
    ]
