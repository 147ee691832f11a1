"""A step is a transaction: whatever is raised, wherever, no request loses a token, its random stream or its result.

The trace function of Python raises at the lines of the package, one run for each place. What comes out is compared with
a run that nothing disturbed.
"""

import linecache
import sys
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import pagedkv
from pagedkv.errors import InvalidArgumentError

from .oracle import prompts

ROOT = str(Path(pagedkv.__file__).parent)
CONSUMERS = {"engine/engine.py", "engine/ledger.py", "engine/outbox.py", "engine/streams.py"}
STEP = CONSUMERS | {"engine/stepping.py", "engine/scheduler.py", "engine/sampling.py"}
# functions that must be among the places
MUST_RAISE = {
    "_steps": {
        "engine/engine.py": {"add_request", "step"},
        "engine/ledger.py": {"start", "_queue", "step", "change", "_advance", "_record", "_end", "_settle", "deliver"},
        "engine/stepping.py": {"decide", "_draft", "_commit", "_sample", "_fork", "_verify", "confirm"},
        "engine/scheduler.py": {"add", "fork", "remove", "schedule", "_prefill", "_admit", "_preempt", "_leave_row"},
        "engine/sampling.py": {"draw", "_pick", "_take", "_score"},
        "engine/outbox.py": {"note", "take", "deliver", "_put", "_finish", "_decode"},
        "engine/runner.py": {"_run"},
        "hf/identity.py": {"look", "inspect", "_is_as_surveyed", "_read_state", "_identity", "_checksum"},
        "hf/handle.py": {"follow_model"},
        "hf/kv_pool.py": {"apply_moves"},
    },
    "_consumers": {
        "engine/engine.py": {"generate", "_run", "stream", "results"},
        "engine/ledger.py": {"leave", "end_all", "step_unless"},
        "engine/streams.py": {"add", "read", "_read"},
    },
}


class OnPurpose(Exception):
    """What no library raises."""


class _Same(LogitsProcessor, StoppingCriteria):
    """Changes nothing, ends nothing."""

    def __call__(self, input_ids, scores):
        return torch.zeros(len(input_ids), dtype=torch.bool) if scores is None else scores


class _Keeps(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values += value.flatten().tolist()

    def end(self): ...


class _Words:
    """A tokenizer of numbers."""

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class _Lines:
    """Counts the lines of the package that run."""

    def __init__(self):
        self.counts = Counter()
        self.names = {}

    def __call__(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame, event, argument):
        if event == "line":
            place = frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_lineno
            self.counts[place] += 1
            self.names[place] = frame.f_code.co_name
        return self._line


class _Raises:
    """Raises when a line runs for the n-th time."""

    def __init__(self, file, function, line, count, error):
        self.file, self.function, self.line, self.count, self.error = f"{ROOT}/{file}", function, line, count, error

    def __call__(self, frame, event, argument):
        code = frame.f_code
        return self._line if code.co_name == self.function and code.co_filename == self.file else None

    def _line(self, frame, event, argument):
        if event == "line" and frame.f_lineno == self.line:
            self.count -= 1
            if self.count == 0:
                sys.settrace(None)
                raise self.error("on purpose")
        return self._line


def _run(scenario, engine, trace):
    sys.settrace(trace)
    try:
        return scenario(engine)
    finally:
        sys.settrace(None)
        engine.check_integrity()
        assert engine.is_idle
        assert not engine.runner.patch._turn.is_switched
        assert not engine.runner.patch._turn.lock._is_owned()
        assert engine.manager.num_free_blocks == engine.manager.pool.num_usable
        assert engine.manager.reset_prefix_cache()


class _Memory:
    """In place of a model: logits that depend on every token whose key lies in the blocks of a row, and round nothing.

    What is computed again after an interrupt is then the same to the bit, and a block that lacks a token shows.
    """

    def __init__(self, runner):
        self.keys = runner.cache.paged[0].key_cache[:, :, 0, 0].numpy()  # [N, S]
        self.choices = torch.randn(997, 101, generator=torch.Generator().manual_seed(1))

    def __call__(self, inputs):
        slots, table, lengths, offsets = (x and x[0].tolist() for x in inputs.indices.values())
        size, ids = self.keys.shape[1], inputs.ids[0].tolist()
        for slot, token in zip(slots, ids, strict=True):
            if slot >= 0:
                self.keys[slot // size, slot % size] = token
        offsets = offsets or range(len(lengths) + 1)
        logits = torch.zeros(len(ids), 101)
        for row, length in enumerate(lengths):
            seen = [int(self.keys[table[row][at // size], at % size]) for at in range(length)]
            first = length - (offsets[row + 1] - offsets[row])
            for at in range(max(0, first), length):
                logits[offsets[row] + at - first] = self._logits(seen[: at + 1])
        return logits if inputs.logits_at is None else logits[inputs.logits_at]

    def _logits(self, seen):
        mixed = 0
        for token in seen:
            mixed = (mixed * 31 + token + 7) % 997
        logits = self.choices[mixed].clone()
        if mixed % 5 and seen[-1] in seen[:-1]:  # often what followed last time, so that drafts are right
            logits[seen[len(seen) - 1 - seen[-2::-1].index(seen[-1])]] += 9
        return logits


def _twice(call, engine):
    """What an interrupted caller does: the same again."""
    try:
        return call()
    except (KeyboardInterrupt, OnPurpose, InvalidArgumentError):  # the last: as what the streamer raises
        engine.check_integrity()
        return call()


def _steps(engine):
    """Requests of every kind, served by steps: tokens, reason and text of each, and what was given out on the way."""
    asked = prompts(4, 9, 14, seed=3)
    draft = (asked[2][:4] * 4)[:14]
    streamer = _Keeps()
    wishes = [
        (asked[0], {"streamer": streamer, "max_new_tokens": 5}),
        (asked[1], {"do_sample": True, "num_return_sequences": 2, "seed": 5, "logprobs": 1, "max_new_tokens": 4}),
        (draft, {"prompt_lookup_num_tokens": 2, "stopping_criteria": [_Same()], "max_new_tokens": 6}),
        (asked[3], {"do_sample": True, "seed": 1, "logits_processor": [_Same()], "max_new_tokens": 4, "priority": 1}),
    ]
    ids = [_twice(lambda: engine.add_request(prompt, **options), engine) for prompt, options in wishes]  # noqa: B023 (called at once)
    results, told = [], {}
    while not engine.is_idle:
        output = _twice(engine.step, engine)
        results += output.finished
        for token in output.tokens:
            told.setdefault((ids.index(token.request_id), token.sample), []).append(token.token_id)
    found = {(ids.index(r.request_id), r.sample): r for r in results}
    assert len(found) == len(results) == 5
    assert told == {key: result.token_ids for key, result in found.items() if result.token_ids}
    if found[0, 0].error is None:  # an interrupt just before put() is one within it: the token is not put again
        lost = Counter(asked[0] + found[0, 0].token_ids) - Counter(streamer.values)
        assert lost.total() <= 1
    return found


def _consumers(engine):
    """`generate`, `stream` and `results` beside one another; None for a call that was interrupted."""
    asked = prompts(4, 9, 14, seed=4)
    found = {}
    added = _twice(lambda: engine.add_request(asked[0], max_new_tokens=12, do_sample=True, seed=2), engine)
    for name, call in {
        "generate": lambda: engine.generate(asked[1:3], max_new_tokens=3, do_sample=True, seed=3),
        "stream": lambda: list(engine.stream(asked[3], max_new_tokens=4)),
    }.items():
        try:
            got = call()
        except (KeyboardInterrupt, OnPurpose, RuntimeError):
            continue
        if name == "stream":
            assert len(got) == 4
            found["stream"] = [token.token_id for token in got], "".join(token.text for token in got)
        else:
            found |= enumerate(got)
    found["added"] = _twice(lambda: engine.results(added), engine)[0]
    return found


def _is_right(got, expected, error):
    """The same; or, where an exception came between, an error after tokens of the undisturbed run."""
    if isinstance(got, tuple):
        return got == expected
    same = got.token_ids == expected.token_ids, got.finish_reason == expected.finish_reason, got.text == expected.text
    failed = got.finish_reason == "error" and got.token_ids == expected.token_ids[: len(got.token_ids)]
    return all(same) or (error is OnPurpose and failed)


def _places(lines, scenario, error):
    """(file, function, line, n-th time): every second line of a step, once at its first and once at its last time; a
    third of what lies around it."""
    is_interrupt, every_third, seen = error is KeyboardInterrupt, cycle([True, False, False]), Counter()
    for (file, line), count in lines.counts.items():
        function, middle = lines.names[file, line], count // 2 + 1
        text = linecache.getline(f"{ROOT}/{file}", line).lstrip()
        if text.startswith("with ") or function == "is_idle" or (text == "try:\n" and file.startswith("hf/")):
            continue  # no interrupt can come at a `try`, nor where Python reports `with` again, before __exit__
        seen[file, function] += 1
        if scenario is not _steps:
            if file in CONSUMERS:
                yield file, function, line, middle
        elif file in STEP:
            if is_interrupt:
                yield file, function, line, 1 if seen[file, function] % 2 else count
            elif seen[file, function] % 2:
                yield file, function, line, middle
        elif is_interrupt and (file.startswith("hf/") or next(every_third)):
            yield file, function, line, middle


@pytest.mark.parametrize("error", [KeyboardInterrupt, OnPurpose])
@pytest.mark.parametrize("scenario", [_steps, _consumers])
def test_whatever_is_raised_at_whatever_line_loses_nothing(llama, make_engine, scenario, error):
    engine = make_engine(llama, _Words(), num_blocks=15, max_num_seqs=5, max_num_batched_tokens=24)
    engine.runner._forward = _Memory(engine.runner)
    _run(scenario, engine, None)  # what is made at first use
    lines = _Lines()
    expected = _run(scenario, engine, lines)
    assert scenario is _consumers or min(engine.stats().num_preemptions, engine.stats().num_accepted_tokens) > 0
    raised = Counter()
    for place in _places(lines, scenario, error):
        trace = _Raises(*place, error)
        found = _run(scenario, engine, trace)
        assert scenario is _consumers or found.keys() == expected.keys(), place
        for key, got in found.items():
            assert _is_right(got, expected[key], error), (place, key, got, expected[key])
        raised[place[:2]] += trace.count == 0
    print(f"{error.__name__} {raised.total()} times in {len(raised)} functions:", *sorted(raised), sep="\n  ")
    for file, functions in MUST_RAISE[scenario.__name__].items():
        if error is OnPurpose and file not in STEP:
            continue
        assert functions <= {function for name, function in raised if name == file and raised[name, function]}, file


class _During:
    """In place of a ledger's `_recover`: the same, with a trace function while it runs."""

    def __init__(self, ledger):
        self.recover, self.trace = ledger._recover, None
        ledger._recover = self

    def __call__(self):
        trace, self.trace = self.trace, None
        sys.settrace(trace)
        try:
            self.recover()
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("function", ["_commit", "_settle"])
def test_an_interrupt_of_the_recovery_too_loses_nothing(llama, make_engine, function):
    """The first one comes before the step stands, or behind it."""
    engine = make_engine(llama, _Words(), num_blocks=15, max_num_seqs=5, max_num_batched_tokens=24)
    engine.runner._forward = _Memory(engine.runner)
    during, lines = _During(engine._ledger), _Lines()
    _run(_steps, engine, lines)
    expected = _run(_steps, engine, None)
    first = next((*place, lines.counts[place] // 2) for place in lines.counts if lines.names[place] == function)

    def disturbed(trace):
        during.trace = trace
        file, line, count = first
        found = _run(_steps, engine, _Raises(file, function, line, count, KeyboardInterrupt))
        assert during.trace is None
        assert found.keys() == expected.keys()
        return all(_is_right(got, expected[key], KeyboardInterrupt) for key, got in found.items())

    recovery = _Lines()
    assert disturbed(recovery)
    raised = set()
    for (file, line), count in recovery.counts.items():
        name = recovery.names[file, line]
        if linecache.getline(f"{ROOT}/{file}", line).lstrip().startswith("with "):
            continue
        trace = _Raises(file, name, line, count // 2 + 1, KeyboardInterrupt)
        assert disturbed(trace), (file, name, line)
        raised |= {name} if trace.count == 0 else set()
    assert {"_record", "_recover", "rewind", "reset", "_give_back", "preempt", "check_integrity"} <= raised
