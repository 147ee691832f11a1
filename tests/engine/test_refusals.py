"""Models that need more than token, position, keys and values are refused by name, and left as they were."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import pagedkv
from pagedkv.hf import UnsupportedModelError

from .conftest import build_llama

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _model(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes)).eval()


def _dynamic_rope():
    return build_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


class PositionsFromTheMask(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **kwargs):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=positions, cache=cache, **kwargs)


class NoPositions(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, cache=None, use_cache=None):
        return super().forward(input_ids, attention_mask=attention_mask, cache=cache, use_cache=use_cache)


def _encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: _model("qwen3_next", num_hidden_layers=4, num_experts=4, num_experts_per_tok=1, head_dim=8,
                        moe_intermediate_size=16, shared_expert_intermediate_size=16), "recurrent or convolutional"),
        (lambda: _model("lfm2", num_hidden_layers=3, full_attn_idxs=[1]), "recurrent or convolutional"),
        (_dynamic_rope, "rotary embedding depends on the longest row"),
        (lambda: PositionsFromTheMask(build_llama().config).eval(), "differ from its own"),
        (lambda: NoPositions(build_llama().config).eval(), "no argument position_ids"),
        (lambda: _model("bloom", n_head=4, n_layer=1), "position_ids"),
        (lambda: _model("mamba"), "can not be served"),
        (_encoder_decoder, "encoder-decoder"),
    ],
    ids=["hybrid", "convolutional", "dynamic rope", "positions ignored", "no positions", "bloom", "mamba", "t5"],
)  # fmt: skip
def test_refused_by_name(build, reason):
    model = build()
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as error:
        pagedkv.Engine(model, num_blocks=16)
    assert type(model).__name__ in str(error.value)
    assert reason in str(error.value)
    assert model.config._attn_implementation == implementation
