"""Order of service, preemption, and what is refused because it can never fit."""

import pytest

from pagedkv.errors import InvalidArgumentError

from .oracle import assert_native, prompts


def _run(engine):
    """Results in the order of finishing."""
    finished = []
    while engine.stats().num_running + engine.stats().num_waiting:
        finished += engine.step().finished
    return finished


def test_priorities_come_first_then_arrival(llama, make_engine):
    engine = make_engine(llama, max_num_seqs=1)
    priorities = [0, 5, 0, 9, 5]
    ids = [engine.add_request([1, 2, i], max_new_tokens=3, priority=p) for i, p in enumerate(priorities)]
    order = [ids.index(result.request_id) for result in _run(engine)]
    assert order == [3, 1, 4, 0, 2]


def test_a_late_urgent_request_displaces_a_running_one(llama, make_engine):
    engine = make_engine(llama, max_num_seqs=2)
    slow = [engine.add_request([i, 2, 3], max_new_tokens=20) for i in (1, 2)]
    engine.step()
    urgent = engine.add_request([7, 7], max_new_tokens=4, priority=1)
    finished = _run(engine)
    assert [result.request_id for result in finished] == [urgent, *slow]
    assert [result.num_preemptions for result in finished] == [0, 0, 1]  # the youngest of the lowest priority went
    assert_native(llama, finished[:1], max_new_tokens=4)
    assert_native(llama, finished[1:], max_new_tokens=20)


def test_decode_goes_on_while_a_long_prompt_is_computed(llama, make_engine):
    engine = make_engine(llama, num_blocks=128, max_num_batched_tokens=16)
    short = engine.add_request([1, 2, 3], max_new_tokens=30)
    engine.step()
    long = engine.add_request(prompts(1, 150, 150)[0], max_new_tokens=2)
    steps = []
    while engine.stats().num_running + engine.stats().num_waiting:
        steps.append({token.request_id for token in engine.step().tokens})
    first_long = next(i for i, ids in enumerate(steps) if long in ids)
    assert first_long == 9  # 150 tokens, 15 a step beside the one that decodes
    assert all(short in ids for ids in steps[: first_long + 1])


def test_the_oldest_finishes_though_all_want_every_block(llama, make_engine):
    engine = make_engine(llama, num_blocks=14, watermark=0.0)
    ids = [engine.add_request(prompt, max_new_tokens=35) for prompt in prompts(6, 10, 17)]
    finished = _run(engine)
    assert finished[0].request_id == ids[0]
    assert sorted(result.request_id for result in finished) == ids
    assert engine.stats().num_preemptions > 3
    assert_native(llama, finished, max_new_tokens=35)


def test_the_whole_pool_can_serve_one_request_and_no_token_more(llama, make_engine):
    engine = make_engine(llama, num_blocks=14)  # 13 blocks of 4 tokens; the last token's keys are never written
    fits = engine.generate(prompts(1, 40, 40), max_new_tokens=12)
    assert_native(llama, fits, max_new_tokens=12)
    text = r"^prompts\[0\]: prompt: expected at most 52 tokens .*13 blocks of 4\), got 40 tokens, up to 53 "
    with pytest.raises(InvalidArgumentError, match=text):
        engine.generate(prompts(1, 40, 40), max_new_tokens=13)


def test_samples_wait_for_as_many_rows(llama, make_engine):
    engine = make_engine(llama, max_num_seqs=4, num_blocks=20)
    for seed, prompt in enumerate(prompts(5, 4, 20)):
        engine.add_request(prompt, max_new_tokens=12, num_return_sequences=3, do_sample=True, seed=seed)
    most, finished = 0, []
    while engine.stats().num_running + engine.stats().num_waiting:
        finished += engine.step().finished
        most = max(most, engine.stats().num_running)
    assert len(finished) == 15
    assert most <= 4
    assert {result.finish_reason for result in finished} == {"length"}


def test_reprs_say_what_runs_and_what_is_used(llama, make_engine):
    engine = make_engine(llama, num_blocks=21, max_num_seqs=1)
    for _ in range(3):
        engine.add_request([1, 2, 3, 4, 5], max_new_tokens=4)
    engine.step()
    blocks = "2 of 20 blocks of 4 tokens used"
    assert repr(engine) == f"Engine(LlamaForCausalLM, 1 of 1 sequences running, 2 waiting, {blocks})"
    per_block = 4 * 2 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, heads, head size, bytes
    assert repr(engine.runner.pool) == f"Pool({blocks}, {2 * per_block} of {21 * per_block} bytes, windows [None])"
    engine.close()
    assert "0 of 20 blocks" in repr(engine)
    assert repr(engine).endswith(", closed)")
