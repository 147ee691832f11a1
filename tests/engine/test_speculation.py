"""Prompt-lookup drafts change how fast tokens come, never which."""

import pytest

from .oracle import assert_native, prompts


def _repetitive(count, seed):
    """Prompts whose endings occur before, so that drafts are found."""
    return [(prompt * 6)[: 20 + 3 * i] for i, prompt in enumerate(prompts(count, 3, 7, seed=seed))]


@pytest.mark.parametrize("options", [{}, {"num_blocks": 24, "max_num_batched_tokens": 20}], ids=["roomy", "tiny pool"])
def test_greedy_tokens_are_those_of_plain_decoding(llama, make_engine, options):
    engine = make_engine(llama, **options)
    asked = _repetitive(8, seed=2) + prompts(3, 2, 9)
    results = engine.generate(asked, max_new_tokens=40, prompt_lookup_num_tokens=4)
    assert_native(llama, results, max_new_tokens=40)
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    assert 0 < stats.acceptance_rate < 1
    assert stats.num_accepted_tokens == round(stats.acceptance_rate * stats.num_draft_tokens)
    assert stats.num_generated_tokens == sum(len(result.token_ids) for result in results)


def test_accepted_drafts_save_steps(llama, make_engine):
    engine = make_engine(llama)
    prompt = _repetitive(1, seed=2)
    engine.generate(prompt, max_new_tokens=60)
    plain = engine.stats().num_steps
    engine.generate(prompt, max_new_tokens=60, prompt_lookup_num_tokens=5)
    stats = engine.stats()
    assert stats.num_steps - plain == plain - stats.num_accepted_tokens
    assert stats.num_accepted_tokens > 0


def test_sampled_tokens_are_those_of_plain_decoding(llama, make_engine):
    asked = _repetitive(4, seed=8)
    options = {"do_sample": True, "temperature": 0.3, "max_new_tokens": 40, "seed": 4, "repetition_penalty": 0.8}
    plain = make_engine(llama).generate(asked, **options)
    engine = make_engine(llama)
    drafted = engine.generate(asked, prompt_lookup_num_tokens=3, **options)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert engine.stats().num_accepted_tokens > 0


def test_an_end_of_sequence_inside_a_draft_ends_the_request(llama, make_engine):
    engine = make_engine(llama)
    for prompt in _repetitive(4, seed=2):
        free = engine.generate([prompt], max_new_tokens=40)[0].token_ids
        for stop in {free[3], free[11], free[-1]}:
            options = {"max_new_tokens": 40, "eos_token_id": stop}
            result = engine.generate([prompt], prompt_lookup_num_tokens=6, **options)[0]
            assert result.token_ids == free[: free.index(stop) + 1]
            assert result.finish_reason == "eos"


def test_windowed_layers(make_engine):
    from .test_oracle import _gemma3

    model = _gemma3()
    engine = make_engine(model, num_blocks=80)
    results = engine.generate(_repetitive(6, seed=3), max_new_tokens=30, prompt_lookup_num_tokens=4)
    assert_native(model, results, max_new_tokens=30)
    assert engine.stats().num_draft_tokens > 0
