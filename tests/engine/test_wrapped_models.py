"""Models inside PEFT and compiled modules: an engine runs the transformers model in them, adapters included."""

import peft
import pytest
import torch

import pagedkv
from pagedkv.hf import UnsupportedModelError

from .conftest import build_llama
from .oracle import native

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]


def _lora(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    "wrap",
    [_lora, torch.compile, lambda model: torch.compile(_lora(model)), lambda model: _lora(torch.compile(model))],
    ids=["peft", "compiled", "compiled peft", "peft over compiled"],
)
def test_tokens_are_the_wrapped_models(wrap, make_engine):
    plain = [native(build_llama(), prompt, max_new_tokens=8) for prompt in PROMPTS]
    model = wrap(build_llama())
    engine = make_engine(model)
    inner = engine.model
    expected = [native(inner, prompt, max_new_tokens=8) for prompt in PROMPTS]
    results = engine.generate(PROMPTS, max_new_tokens=8, do_sample=False)
    assert [result.token_ids for result in results] == expected
    assert (expected == plain) == (wrap is torch.compile)
    if wrap is _lora:
        with model.disable_adapter():
            results = engine.generate(PROMPTS, max_new_tokens=8, do_sample=False)
        assert [result.token_ids for result in results] == plain


def test_soft_prompts_are_refused_by_name():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(build_llama(), config).eval()
    with pytest.raises(UnsupportedModelError, match="vectors before the prompt that are no tokens"):
        pagedkv.Engine(model, num_blocks=16)
