"""What an interrupt, a cancelled consumer or a broken tokenizer leaves behind: the cases that users have met."""

import asyncio
import contextlib
import threading

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from pagedkv.errors import InvalidArgumentError

from .conftest import build_llama
from .oracle import assert_native, native, prompts


class _Interrupts(BaseStreamer):
    """Raises at one of the tokens."""

    def __init__(self, at):
        self.left = at + 1  # the prompt is the first

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def end(self): ...


class _Numbers:
    """A tokenizer whose decode raises when its turn comes."""

    def __init__(self, fails_at=()):
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        self.calls += 1
        if self.calls in self.fails_at:
            raise ValueError("on purpose")
        return " ".join(map(str, ids))


def _run(engine):
    found = {}
    while not engine.is_idle:
        try:
            found.update({(result.request_id, result.sample): result for result in engine.step().finished})
        except KeyboardInterrupt:  # noqa: PERF203 (the next step goes on)
            engine.check_integrity()
    return found


def test_text_that_can_not_be_decoded_fails_one_request(llama, make_engine):
    engine = make_engine(llama, _Numbers(fails_at={1}))
    asked = prompts(3, 3, 9)
    ids = [engine.add_request(prompt, max_new_tokens=3 + index) for index, prompt in enumerate(asked)]
    found = _run(engine)
    failed, *rest = (found[request, 0] for request in ids)
    assert (failed.finish_reason, failed.error) == ("error", "tokenizer.decode(): ValueError: on purpose")
    assert failed.token_ids == native(llama, asked[0], max_new_tokens=3, do_sample=False)
    assert [result.text for result in rest] == [" ".join(map(str, result.token_ids)) for result in rest]
    assert [result.finish_reason for result in rest] == ["length"] * 2


def test_a_tokenizer_that_fails_in_a_stream_ends_it(llama, make_engine):
    engine = make_engine(llama, _Numbers(fails_at={3}))
    other = engine.add_request([4, 5, 6], max_new_tokens=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        list(engine.stream([1, 2, 3], max_new_tokens=9))
    assert engine.results(other)[0].token_ids == native(llama, [4, 5, 6], max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("eos", [None, 4])
def test_an_interrupt_at_a_token_keeps_its_stop_decision(llama, make_engine, at, eos):
    prompt = next(p for p in prompts(20, 4, 9) if len(set(native(llama, p, max_new_tokens=6, do_sample=False))) == 6)
    expected = native(llama, prompt, max_new_tokens=6, do_sample=False)
    options = {} if eos is None else {"eos_token_id": expected[eos - 1]}
    engine = make_engine(llama)
    request = engine.add_request(prompt, max_new_tokens=6, streamer=_Interrupts(min(at, eos or at)), **options)
    result = _run(engine)[request, 0]
    assert result.token_ids == expected[:eos]
    assert result.finish_reason == ("eos" if eos else "length")


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupt_leaves_the_random_streams_of_others(llama, make_engine, at):
    sampled = {"do_sample": True, "max_new_tokens": 8, "seed": 3}
    expected = make_engine(llama).generate([[4, 5, 6]], **sampled)[0].token_ids
    engine = make_engine(llama)
    first = engine.add_request([1, 2, 3], max_new_tokens=5, streamer=_Interrupts(at), do_sample=True, seed=9)
    second = engine.add_request([4, 5, 6], **sampled)
    found = _run(engine)
    assert found[second, 0].token_ids == expected
    assert len(found[first, 0].token_ids) == 5


def test_an_interrupt_in_a_processor_takes_back_every_random_number_of_the_step(llama, make_engine):
    sampled = {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 3, "seed": 3}
    expected = make_engine(llama).generate([[4, 5, 6]], **sampled)

    class Interrupts(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls in (1, 3, 6):
                raise KeyboardInterrupt
            return scores

    engine = make_engine(llama)
    request = engine.add_request([4, 5, 6], **sampled)
    engine.add_request([1, 2, 3], max_new_tokens=6, logits_processor=[Interrupts()])
    found = _run(engine)
    assert [found[request, i].token_ids for i in range(3)] == [result.token_ids for result in expected]


@pytest.mark.parametrize("is_started", [False, True])
def test_a_task_cancelled_while_astream_adds_its_request_leaves_none(llama, make_engine, monkeypatch, is_started):
    engine = make_engine(llama)
    start, arrived = engine._ledger.start, threading.Event()
    monkeypatch.setattr(engine._ledger, "start", lambda requests: (arrived.set(), start(requests)))

    async def main():
        async def consume():
            async for _ in engine.astream([1, 2, 3], max_new_tokens=200):
                pytest.fail("a token came")

        engine._ledger.lock.acquire()  # as if a step ran
        task = asyncio.create_task(consume())
        await (asyncio.to_thread(arrived.wait) if is_started else asyncio.sleep(0))
        task.cancel()
        await asyncio.sleep(0)
        engine._ledger.lock.release()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert engine.is_idle
    assert (engine.stats().num_steps, engine.stats().num_waiting) == (0, 0)


def test_results_that_the_steps_of_another_consumer_bring(llama, make_engine):
    engine = make_engine(llama)
    asked = prompts(4, 3, 9)
    expected = [native(llama, prompt, max_new_tokens=4, do_sample=False) for prompt in asked]
    first, second = (engine.add_request(prompt, max_new_tokens=4) for prompt in asked[:2])
    assert engine.generate([asked[2]], max_new_tokens=6)
    assert not engine.is_idle
    assert engine.results(first)[0].token_ids == expected[0]
    output = engine.step()
    assert [(result.request_id, result.token_ids) for result in output.finished] == [(second, expected[1])]
    assert [token.token_id for token in output.tokens] == expected[1]
    assert engine.is_idle
    assert engine.results(second)[0].token_ids == expected[1]  # also after a step gave it out
    third = engine.add_request(asked[3], max_new_tokens=4)
    assert engine.results(third)[0].token_ids == expected[3]  # which runs the steps itself
    assert engine.is_idle
    with pytest.raises(InvalidArgumentError, match=r"^request_id: expected a request whose results are still here"):
        engine.results(10**6)


def test_threads_that_generate_stream_and_ask_for_results(llama, make_engine):
    engine = make_engine(llama, num_blocks=40)
    asked = prompts(12, 2, 20)
    found = {}

    def serve(index):
        options = {"max_new_tokens": 10}
        if index % 3 == 0:
            found[index] = engine.generate([asked[index]], **options)[0].token_ids
        elif index % 3 == 1:
            found[index] = [token.token_id for token in engine.stream(asked[index], **options)]
        else:
            found[index] = engine.results(engine.add_request(asked[index], **options))[0].token_ids

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: native(llama, p, max_new_tokens=10, do_sample=False) for i, p in enumerate(asked)}


def test_a_processor_may_abort_but_not_step(llama, make_engine):
    engine = make_engine(llama)
    doomed = engine.add_request([1, 2, 3], max_new_tokens=9)

    class Meddles(LogitsProcessor):
        refused = None

        def __call__(self, input_ids, scores):
            engine.abort(doomed)
            try:
                engine.step()
            except RuntimeError as error:
                self.refused = str(error)
            return scores

    meddler = Meddles()
    good = engine.add_request([4, 5, 6], max_new_tokens=4, logits_processor=[meddler])
    found = _run(engine)
    assert (found[doomed, 0].finish_reason, found[doomed, 0].token_ids) == ("abort", [])
    assert "inside a step" in meddler.refused
    assert_native(llama, [found[good, 0]], max_new_tokens=4)


def test_a_manager_that_was_interrupted_midway_begins_anew(make_engine):
    engine = make_engine(build_llama(), num_host_blocks=20)
    ids = [engine.add_request(prompt, max_new_tokens=8) for prompt in prompts(3, 4, 12)]
    engine.step()
    manager, pool = engine.manager, engine.manager.pool

    def free(seq_id):
        del manager.free, manager.sequences[seq_id]  # and its blocks are nobody's
        raise KeyboardInterrupt

    manager.free = free
    with pytest.raises(KeyboardInterrupt):
        engine.abort(ids[0])
    assert engine.manager.pool is not pool
    found = _run(engine)
    assert found[ids[0], 0].finish_reason == "abort"
    assert_native(engine.model, [found[request, 0] for request in ids[1:]], max_new_tokens=8)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["apply_moves", "manager.take_copies", "manager.allocate_slots"])
def test_memory_that_runs_out_in_a_step_costs_no_request(llama, make_engine, monkeypatch, place, error):
    engine = make_engine(llama, num_blocks=20, max_num_batched_tokens=16, num_host_blocks=10)
    asked = prompts(5, 4, 20)
    ids = [engine.add_request(prompt, max_new_tokens=10) for prompt in asked]
    owner = engine.runner.pool if place == "apply_moves" else engine.manager
    name, count = place.split(".")[-1], 0
    whole = getattr(owner, name)

    def part(*args, **kwargs):
        nonlocal count
        count += 1
        result = whole(*args, **kwargs)
        if count % 7 == 0:
            raise error
        return result

    monkeypatch.setattr(owner, name, part)
    found = {}
    while not engine.is_idle:
        with contextlib.suppress(error):
            found.update({result.request_id: result for result in engine.step().finished})
    assert count > 7
    assert_native(llama, [found[request] for request in ids], max_new_tokens=10)
