"""Sampling is transformers' own: the same seed gives what generate gives, and nothing beside a request changes it."""

import math
import string
import time

import numpy as np
import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    SuppressTokensLogitsProcessor,
)

from pagedkv.errors import InvalidArgumentError

from .conftest import build_llama
from .oracle import assert_native, native, prompts, run

WAYS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "prompt": {"encoder_repetition_penalty": 2.0, "encoder_no_repeat_ngram_size": 2},
    "top_h": {"top_h": 0.4, "top_k": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_gives_what_generate_gives(llama, make_engine, way):
    engine = make_engine(llama)
    asked = prompts(6, 3, 30, seed=11)
    options = {"do_sample": True, "max_new_tokens": 16, **WAYS[way]}
    results = engine.generate(asked, seed=7, **options)
    for index, result in enumerate(results):
        torch.manual_seed(7 + 1000 * index)
        assert result.token_ids == native(llama, asked[index], **options)


def test_samples_do_not_depend_on_what_runs_beside(llama, make_engine):
    prompt = prompts(1, 20, 20)[0]
    options = {"do_sample": True, "max_new_tokens": 20, "seed": 3}
    alone = make_engine(llama).generate([prompt], **options)[0].token_ids
    engine = make_engine(llama, num_blocks=26, max_num_batched_tokens=16)
    request = engine.add_request(prompt, priority=-1, **options)
    for index, other in enumerate(prompts(8, 5, 30, seed=4)):
        engine.add_request(other, max_new_tokens=15, do_sample=index % 2 == 0, top_k=7)
    found = None
    while found is None:
        found = next((result for result in engine.step().finished if result.request_id == request), None)
    assert found.num_preemptions > 0
    assert found.token_ids == alone


def test_unseeded_requests_follow_the_global_seed_and_differ(llama, make_engine):
    engine = make_engine(llama)
    prompt = prompts(1, 9, 9)[0]

    def draw():
        torch.manual_seed(5)
        return [r.token_ids for r in engine.generate([prompt] * 3, do_sample=True, max_new_tokens=12)]

    first = draw()
    assert first == draw()
    assert len(set(map(tuple, first))) == 3


def test_several_samples_share_the_prompt_and_differ(llama, make_engine):
    engine = make_engine(llama, num_blocks=24)
    prompt = prompts(1, 30, 30)[0]
    results = engine.generate([prompt], do_sample=True, num_return_sequences=4, max_new_tokens=10, seed=1)
    assert [result.sample for result in results] == [0, 1, 2, 3]
    assert len({tuple(result.token_ids) for result in results}) == 4
    for index, result in enumerate(results):
        torch.manual_seed(1 + index)
        assert result.token_ids == native(llama, prompt, do_sample=True, max_new_tokens=10)
    assert engine.stats().num_prompt_tokens == 30
    assert engine.stats().kv.num_copies > 0  # of the block that the samples shared


def test_end_of_sequence_ids_and_lengths(llama, make_engine):
    engine = make_engine(llama)
    prompt = prompts(1, 12, 12, seed=2)[0]
    free = native(llama, prompt, max_new_tokens=12, do_sample=False)
    stop = free.index(free[5])
    cases = [
        ({"eos_token_id": free[5]}, free[: stop + 1], "eos"),
        ({"eos_token_id": [100, free[5]]}, free[: stop + 1], "eos"),
        ({"max_length": 15, "max_new_tokens": None}, free[:3], "length"),
    ]
    for options, expected, reason in cases:
        result = engine.generate([prompt], **{"max_new_tokens": 12, **options})[0]
        assert (result.token_ids, result.finish_reason) == (expected, reason), options


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 9},
        {"min_length": 20},
        {"bad_words_ids": [[3], [7, 8], [50]]},
        {"suppress_tokens": [1, 2, 3, 60]},
        {"begin_suppress_tokens": [9, 10, 11]},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"forced_eos_token_id": 17},
        {"sequence_bias": [[[5], 3.0]]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_the_config(llama, make_engine, options):
    prompt = prompts(1, 12, 12, seed=2)[0]
    free = native(llama, prompt, max_new_tokens=12, do_sample=False)
    options = {"eos_token_id": free[3], "max_new_tokens": 12, "do_sample": False, **options}
    result = make_engine(llama).generate([prompt], **options)[0]
    assert result.token_ids == native(llama, prompt, **options)


def test_processors_and_criteria_of_the_user(llama, make_engine):
    engine = make_engine(llama)
    prompt = prompts(1, 12, 12, seed=2)[0]
    free = native(llama, prompt, max_new_tokens=12, do_sample=False)
    processor = SuppressTokensLogitsProcessor([free[0]], device="cpu")
    criterion = EosTokenCriteria(free[4])
    changed, stopped, plain = (
        engine.add_request(prompt, max_new_tokens=12, logits_processor=[processor]),
        engine.add_request(prompt, max_new_tokens=12, stopping_criteria=[criterion]),
        engine.add_request(prompt, max_new_tokens=12),
    )
    found = run(engine)
    assert found[changed].token_ids == native(
        llama, prompt, max_new_tokens=12, suppress_tokens=[free[0]], do_sample=False
    )
    assert found[stopped].token_ids == free[: free.index(free[4]) + 1]
    assert found[stopped].finish_reason == "stopping_criteria"
    assert found[plain].token_ids == free


def test_max_time(llama, make_engine):
    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.02)
            return scores

    result = make_engine(llama).generate([[1, 2]], max_new_tokens=200, max_time=0.1, logits_processor=[Slow()])[0]
    assert result.finish_reason == "time"
    assert 0 < len(result.token_ids) < 200


def test_logprobs(llama, make_engine):
    prompt = prompts(1, 12, 12)[0]
    result = make_engine(llama).generate([prompt], max_new_tokens=6, logprobs=3, do_sample=True, seed=1, top_k=0)[0]
    with torch.no_grad():
        logits = llama(torch.tensor([prompt + result.token_ids])).logits[0]
    for index, (token, logprobs) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        expected = logits[len(prompt) - 1 + index].log_softmax(-1)
        assert set(expected.topk(3).indices.tolist()) | {token} == set(logprobs)
        for other, value in logprobs.items():
            assert math.isclose(value, float(expected[other]), abs_tol=1e-4)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of 101 characters."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {letter: index for index, letter in enumerate(string.printable + "é")}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def test_text_in_and_out_and_stop_strings(llama, make_engine, letters):
    engine = make_engine(llama, letters)
    ids = letters("A text.")["input_ids"]
    free = native(llama, ids, max_new_tokens=12, do_sample=False)
    result = engine.generate(["A text."], max_new_tokens=12)[0]
    assert (result.prompt_ids, result.token_ids) == (ids, free)
    assert result.text == letters.decode(free)
    options = {"max_new_tokens": 12, "stop_strings": [result.text[5:7]], "do_sample": False}
    stopped = engine.generate(["A text."], **options)[0]
    assert stopped.token_ids == native(llama, ids, tokenizer=letters, **options)
    assert len(stopped.token_ids) < 12
    assert stopped.finish_reason == "stop_string"


def test_one_config_per_prompt(llama, make_engine):
    configs = [GenerationConfig(max_new_tokens=n, do_sample=False) for n in (2, 5)]
    results = make_engine(llama).generate([[1, 2], [3, 4]], configs)
    assert [len(result.token_ids) for result in results] == [2, 5]


def test_prompts_of_numpy_integers(llama, make_engine):
    asked = [np.array([1, 2, 3]), list(np.array([1, 2, 3], np.int32)), [1, 2, 3]]
    results = make_engine(llama).generate(asked, max_new_tokens=4)
    assert [result.prompt_ids for result in results] == [[1, 2, 3]] * 3
    assert {type(token) for result in results for token in result.prompt_ids} == {int}
    assert_native(llama, results, max_new_tokens=4)


def test_a_model_in_training_mode_is_refused(make_engine):
    model = build_llama()
    engine = make_engine(model)
    engine.add_request([1, 2, 3], max_new_tokens=6)
    model.train()
    with pytest.raises(InvalidArgumentError, match=r"eval\(\)"):
        make_engine(model)
    with pytest.raises(InvalidArgumentError, match=r"eval\(\)"):
        engine.step()
    model.eval()
    assert engine.step().tokens
