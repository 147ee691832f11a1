"""The acceptance test of patch and Engine: it lets rounding pass, however large it is, and no wrong attention."""

from __future__ import annotations

import pytest
import torch
from models import tiny

import pagedkv
import pagedkv_ops
from pagedkv.hf import UnsupportedModelError

KINDS = {
    "float32": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    # activations in 8 bits, scaled by the largest of the batch: logits move by 5% with what is beside a row
    "int8": lambda model: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8),
}
SERVE = {
    "patch": lambda model: pagedkv.layer_modes(pagedkv.patch(model, num_blocks=16)) == ["paged"] * 3,
    "engine": lambda model: pagedkv.Engine(model, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=8),
}
FAULTS = {
    "softcap": ("gemma2", {"softcap": 0.0}),
    "window": ("mistral", {"window_left": -1}),
    "scale": ("llama", {"scale": 0.27}),  # it is 0.25
    "sinks": ("gpt_oss", {"sinks": None}),
    "causal": ("llama", {"causal": False}),
}
CASES = [(fault, kind, list(SERVE)[(i + j) % 2]) for i, fault in enumerate(FAULTS) for j, kind in enumerate(KINDS)]


def _with(op, change):
    return lambda *args, **kwargs: op(*args, **{**kwargs, **change})


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize(("fault", "kind", "serve"), CASES)
def test_rounding_passes_and_a_wrong_attention_does_not(fault, kind, serve, monkeypatch):
    family, change = FAULTS[fault]
    model = KINDS[kind](tiny(family))
    assert SERVE[serve](model)
    pagedkv.unpatch(model)

    for name in ("paged_attention", "paged_attention_append"):
        monkeypatch.setattr(pagedkv_ops, name, _with(getattr(pagedkv_ops, name), change))
    if serve == "patch":  # the model's own attention over gathered keys is left then
        assert not SERVE[serve](model)
    else:
        with pytest.raises(UnsupportedModelError, match=r"differs? from its own"):
            SERVE[serve](model)


def test_a_checkpoints_generation_config_does_not_reach_the_probe():
    model = tiny("llama")
    model.generation_config.update(cache_implementation="static", num_beams=2, repetition_penalty=1.5)
    before = model.generation_config.to_dict()
    assert SERVE["patch"](model)
    assert model.generation_config.to_dict() == before
