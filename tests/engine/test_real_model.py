"""A real model: SmolLM2-135M in float32, with pools so small that requests displace one another."""

import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .oracle import assert_native, count_scored_near_ties

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


def _prompts_with_shared_starts(tokenizer, count):
    ids = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"]
    chance = random.Random(3)
    starts = [ids[16 * i : 16 * i + 16] for i in range(10)]
    own = [chance.randrange(len(ids) - 12) for _ in range(count)]
    return [chance.choice(starts) + ids[i : i + chance.randint(1, 12)] for i in own]


def test_at_most_one_in_a_hundred_requests_parts_from_native_and_only_at_a_near_tie(
    smollm2, make_engine, record_property
):
    """120 requests beside 12 that are aborted, every token against what the model chooses behind those before it.

    Lengths differ, so that requests end at different steps. How many near-ties there were is recorded and printed.
    """
    model, tokenizer = smollm2
    torch.set_num_threads(2)
    engine = make_engine(model, tokenizer, num_blocks=36, block_size=8, max_num_seqs=16, max_num_batched_tokens=48)
    asked = _prompts_with_shared_starts(tokenizer, 132)
    victims = [engine.add_request(prompt, max_new_tokens=12) for prompt in asked[::11]]
    lengths = random.Random(5).choices(range(3, 11), k=120)
    kept = [prompt for index, prompt in enumerate(asked) if index % 11]
    length_of = {engine.add_request(prompt, max_new_tokens=n): n for prompt, n in zip(kept, lengths, strict=True)}
    results = {}
    while len(results) < len(asked):
        results.update({result.request_id: result for result in engine.step().finished})
        if engine.stats().num_steps % 12 == 0 and victims:
            engine.abort(victims.pop(0))
            engine.check_integrity()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert all(len(results[request].token_ids) == length for request, length in length_of.items())
    near_ties = sum(count_scored_near_ties(model, results[request]) for request in length_of)
    record_property("near_ties", near_ties)
    print(f"{near_ties} near-ties in {len(length_of)} requests")
    assert near_ties <= 1, f"{near_ties} near-ties in {len(length_of)} requests, at most 1 in 100 is allowed"
