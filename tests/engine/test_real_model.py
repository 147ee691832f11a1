"""A real model: SmolLM2-135M in float32, with a pool so small that requests displace one another."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .oracle import assert_native

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from _models import find_model

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "def fibonacci(n):",
    "Water boils at",
    "Once upon a time, in a village at the foot of a mountain, there was a school where",
    "The three primary colours are",
]


@pytest.fixture(scope="module")
def smollm2():
    directory = find_model("smollm2")
    if directory is None:
        pytest.skip("SmolLM2-135M is not here: python examples/_models.py smollm2")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def test_greedy_tokens_are_those_of_generate(smollm2, make_engine):
    model, tokenizer = smollm2
    torch.set_num_threads(2)
    engine = make_engine(model, tokenizer, num_blocks=9, block_size=8, max_num_seqs=4, max_num_batched_tokens=16)
    results = engine.generate(TEXTS, max_new_tokens=16)
    assert_native(model, results, max_new_tokens=16, pad_token_id=0, near_ties_allowed=1)
    assert engine.stats().num_preemptions > 0
    assert all(result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True) for result in results)
