"""What goes wrong in one request, in the model or at the keyboard: what is lost, and that no block is."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from pagedkv.errors import InvalidArgumentError

from .conftest import build_llama
from .oracle import assert_native, native, prompts, run


class _Raises(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Fails at its third call, whatever it is used as."""

    def __init__(self):
        self.calls = 0
        self.ended = False

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise ValueError("on purpose")
        return scores if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self(value, value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("role", ["logits_processor", "stopping_criteria", "streamer"])
def test_a_callback_that_raises_fails_its_request_alone(llama, make_engine, role):
    engine = make_engine(llama)
    culprit = _Raises()
    given = {role: culprit if role == "streamer" else [culprit]}
    bad = engine.add_request([1, 2, 3], max_new_tokens=10, **given)
    good = [engine.add_request(prompt, max_new_tokens=10) for prompt in prompts(4, 2, 20)]
    found = run(engine)
    assert found[bad].finish_reason == "error"
    assert found[bad].error == "ValueError: on purpose"
    assert culprit.ended == (role == "streamer")
    assert_native(llama, [found[request] for request in good], max_new_tokens=10)


@pytest.mark.parametrize("broken", ["draft", "logprobs"])
def test_a_request_whose_draft_or_logprobs_fail_ends_alone(llama, make_engine, broken):
    sampled = {"max_new_tokens": 10, "do_sample": True, "seed": 3}
    expected = make_engine(llama).generate([[4, 5, 6]], **sampled)[0]
    engine = make_engine(llama)
    bad = engine.add_request([1, 2, 3], max_new_tokens=10, prompt_lookup_num_tokens=2, logprobs=2)
    good = engine.add_request([4, 5, 6], **sampled)
    engine.step()
    settings = engine._ledger.requests[bad].settings
    if broken == "draft":
        settings.lookup.max_matching_ngram_size = 1.5
    else:
        settings.logprobs = 1.5
    found = run(engine)
    assert (found[bad].finish_reason, found[bad].error.split(":")[0]) == ("error", "TypeError")
    assert found[good].token_ids == expected.token_ids


def test_a_processor_that_leaves_no_token(llama, make_engine):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf)

    engine = make_engine(llama)
    for options in ({}, {"do_sample": True, "top_k": 0}):
        result = engine.generate([[1, 2, 3]], max_new_tokens=4, logits_processor=[Nothing()], **options)[0]
        assert result.finish_reason == "error"
        assert "no token is left" in result.error


def test_nan_logits_fail_the_request_and_leave_no_prefix_behind(make_engine):
    model = build_llama()
    engine = make_engine(model)
    poison = 77
    model.model.embed_tokens.weight.data[poison] = torch.nan
    bad = prompts(1, 30, 30)[0]
    bad[9] = poison
    good = [[token for token in prompt if token != poison] for prompt in prompts(3, 12, 20, seed=1)]
    first, *rest = engine.generate([bad, *good], max_new_tokens=8, suppress_tokens=[poison])
    assert first.finish_reason == "error"
    assert "NaN" in first.error
    assert_native(model, rest, max_new_tokens=8, suppress_tokens=[poison])
    model.model.embed_tokens.weight.data[poison] = 0.1  # not noticed: no sample of the checksum lies there
    again = engine.generate([bad], max_new_tokens=4)
    assert again[0].num_cached_tokens == 0
    assert_native(model, again, max_new_tokens=4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("host_blocks", [0, 30])
def test_an_interrupted_step_loses_nothing(make_engine, error, host_blocks):
    model = build_llama()
    engine = make_engine(model, num_blocks=24, max_num_batched_tokens=16, num_host_blocks=host_blocks)
    asked = prompts(8, 4, 30, seed=9)
    for prompt in asked:
        engine.add_request(prompt, max_new_tokens=12, num_return_sequences=1)
    engine.add_request(asked[0], max_new_tokens=12, do_sample=True, num_return_sequences=3, seed=5)
    calls = 0

    def hook(module, args):
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    found, interrupted = [], 0
    while len(found) < 11:
        try:
            found += engine.step().finished
        except error:  # noqa: PERF203 (the next step goes on)
            interrupted += 1
            engine.check_integrity()
            assert engine.manager.num_free_blocks == engine.manager.pool.num_usable
    handle.remove()
    assert interrupted > 3
    greedy = [result for result in found if result.request_id < 8]
    assert_native(model, greedy, max_new_tokens=12)
    sampled = sorted((result.sample, result.token_ids) for result in found if result.request_id == 8)
    expected = make_engine(model).generate(
        [asked[0]], max_new_tokens=12, do_sample=True, num_return_sequences=3, seed=5
    )
    assert sampled == [(result.sample, result.token_ids) for result in expected]


def test_keyboard_interrupt_ends_generate_and_its_requests(make_engine):
    model = build_llama()
    engine = make_engine(model)
    calls = 0

    def hook(module, args):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(5, 3, 20), max_new_tokens=20)
    handle.remove()
    assert engine.stats().num_waiting == engine.stats().num_running == 0
    assert_native(model, engine.generate(prompts(3, 3, 20), max_new_tokens=6), max_new_tokens=6)


def test_abort_from_a_callback(llama, make_engine):
    engine = make_engine(llama)
    ids = []

    class Stopper(BaseStreamer):
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                for request in ids:
                    engine.abort(request)

        def end(self): ...

    ids.append(engine.add_request([1, 2, 3], max_new_tokens=30, streamer=Stopper()))
    ids += [engine.add_request(prompt, max_new_tokens=30) for prompt in prompts(3, 2, 20)]
    last = engine.add_request([4, 5, 6], max_new_tokens=10)
    found = run(engine)
    assert [found[request].finish_reason for request in ids] == ["abort"] * 4
    assert len(found[ids[0]].token_ids) == 3
    assert_native(llama, [found[last]], max_new_tokens=10)
    assert not engine.abort(ids[0])


def test_a_closed_engine_takes_nothing(llama, make_engine):
    engine = make_engine(llama)
    with engine:
        engine.add_request([1, 2, 3], max_new_tokens=30)
        engine.step()
    assert engine.stats().num_running == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request([1])


@pytest.mark.parametrize("tokenless", [False, True])
def test_a_stream_of_a_closed_engine_says_so(llama, make_engine, tokenless):
    engine = make_engine(llama)
    stream = engine.stream([1, 2, 3], max_new_tokens=30)
    got = [] if tokenless else [next(stream)]
    if tokenless:  # another consumer has it queued, and closes the engine before its first token
        engine._ledger.step_unless = lambda is_enough: engine.close()
    else:
        engine.close()
    with pytest.raises(RuntimeError, match=r"^request 0: the engine was closed$"):
        got += stream
    assert engine.is_idle
    assert [token.token_id for token in got] == native(llama, [1, 2, 3], max_new_tokens=1, do_sample=False)[: len(got)]


def test_a_failed_stream_raises_what_happened(llama, make_engine):
    with pytest.raises(RuntimeError, match="on purpose"):
        list(make_engine(llama).stream([1, 2], max_new_tokens=9, logits_processor=[_Raises()]))


class _FailsAt(BaseStreamer):
    def __init__(self, method):
        self.method = method

    def put(self, value):
        if self.method == "put":
            raise ValueError("on purpose")

    def end(self):
        if self.method == "end":
            raise ValueError("on purpose")


def test_a_streamer_that_fails_on_the_prompt_adds_nothing(llama, make_engine):
    engine = make_engine(llama)
    with pytest.raises(InvalidArgumentError, match=r"streamer: .* put\(\) raised ValueError: on purpose"):
        engine.add_request([1, 2, 3], max_new_tokens=3, streamer=_FailsAt("put"))
    assert engine.stats().num_waiting == engine.stats().num_prompt_tokens == 0


class _Keeps(_FailsAt):
    def __init__(self):
        super().__init__(None)
        self.values = []

    def put(self, value):
        self.values.append(value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache_salt": object()}, "cache_salt: expected plain values"),
        ({"seed": "a"}, "seed: expected an int"),
        ({"do_sample": True, "num_return_sequences": 2}, "streamer: expected a request with one sample, got 2"),
    ],
)
def test_a_refused_request_has_not_touched_its_streamer(llama, make_engine, options, text):
    streamer = _Keeps()
    with pytest.raises(InvalidArgumentError, match=text):
        make_engine(llama).add_request([1, 2, 3], max_new_tokens=3, streamer=streamer, **options)
    assert not streamer.values


def test_a_streamer_of_several_prompts_is_refused(llama, make_engine):
    streamer = _Keeps()
    with pytest.raises(InvalidArgumentError, match="streamer: expected one prompt, got 2"):
        make_engine(llama).generate([[1, 2], [3, 4]], max_new_tokens=3, streamer=streamer)
    assert not streamer.values


def test_a_streamer_that_fails_at_the_end_is_reported_beside_the_tokens(llama, make_engine):
    failed, fine = (
        make_engine(llama).generate([[1, 2, 3]], max_new_tokens=3, streamer=_FailsAt(method))[0]
        for method in ("end", None)
    )
    assert failed.error == "streamer.end(): ValueError: on purpose"
    assert fine.error is None
    assert (failed.token_ids, failed.finish_reason) == (fine.token_ids, "length")
