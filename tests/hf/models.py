"""Tiny models with random weights, and inputs for them."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv.hf.cache import cache_argument

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

EXTRA = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "attn_implementation": "eager",  # what older releases choose by themselves leaves the softcap out
    },
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_oss": {
        "sliding_window": 6,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def tiny(family: str = "llama", seed: int = 0, **extra):
    """A model of the family in evaluation mode; weights spread out, so that greedy choices are not near-ties."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **EXTRA.get(family, {}), **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def with_cache(model, cache):
    """The cache as an argument: its name differs between releases."""
    return {cache_argument(model): cache}


def generate(model, inputs, **options):
    """Ten greedy tokens, unless the options say otherwise."""
    return model.generate(**inputs, **{"max_new_tokens": 10, "do_sample": False, **options})


def ragged(lengths, seed: int = 0, side: str = "left", vocabulary: int = 128):
    """input_ids and attention_mask of rows of these lengths, padded on one side with id 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        columns = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, columns] = torch.randint(2, vocabulary, (length,), generator=generator)
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Computed:
    """Tokens that the model embeds in each call, counted below the model: with a hook it would share no blocks."""

    def __init__(self, model):
        self.calls = []
        embed, weight = torch.nn.functional.embedding, model.get_input_embeddings().weight

        def count(ids, table, *args, **kwargs):
            if table is weight:
                self.calls.append(ids.numel())
            return embed(ids, table, *args, **kwargs)

        torch.nn.functional.embedding = count

    def take(self):
        calls, self.calls = self.calls, []
        return calls
