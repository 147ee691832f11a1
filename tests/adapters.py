"""PEFT adapters on tiny models."""

from __future__ import annotations

import pytest
import torch

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "gate_proj"]


def with_adapters(model, config=None, names=("one", "two"), **options):
    """The model inside a PEFT wrapper, with adapters whose outputs differ; the first is active."""
    settings = {"target_modules": ALL, "init_lora_weights": False, "lora_alpha": 64, **options}
    config = config or peft.LoraConfig(**settings)
    torch.manual_seed(1)
    wrapper = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapper.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in wrapper.named_parameters():
            if any(f".{adapter}" in name for adapter in names):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return wrapper.eval()


def set_scale(wrapper, name, scale):
    for module in wrapper.modules():
        if hasattr(module, "set_scale"):
            module.set_scale(name, scale)


def swap_data(wrapper, source, target):
    """What PEFT's hot-swap does: the values of one adapter are written into another's parameters through .data."""
    parameters = dict(wrapper.named_parameters())
    for name, parameter in parameters.items():
        if f".{source}." in name:
            parameters[name.replace(f".{source}.", f".{target}.")].data.copy_(parameter.data)
