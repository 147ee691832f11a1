"""What leaves an engine: tokens to streamers, results, and what `step` gives out.

This is where objects of users are called: streamers, and the tokenizer that decodes a result. By then the step is
recorded, so that whatever is raised here takes back nothing. A call that is interrupted goes on at the next one: a
streamer gets each token at most once, and each sample has one result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidArgumentError
from .requests import Request, Sample
from .results import NewToken, Result, StepOutput
from .sampling import describe

_KEPT_REQUESTS = 1024  # of those done, so that results can be asked for after a step gave them out


class Outbox:
    """Samples that something is due for.

    Args:
        requests: those that are not done; one that is done is taken out of them.
        fail: ends a sample that runs, with a text.

    Attributes:
        due: samples whose tokens or end were not delivered yet. news: samples of which `step` has something to give
            out, with their first token of it.
        done: requests whose results can be asked for.
        num_prompt, num_cached: tokens of the requests that are done.
    """

    def __init__(self, tokenizer: Any, requests: dict[int, Request], fail: Callable[[Sample, str], None]) -> None:
        self.tokenizer = tokenizer
        self.due: dict[Sample, None] = {}
        self.news: dict[Sample, int] = {}
        self.done: dict[int, Request] = {}
        self.num_prompt = 0
        self.num_cached = 0
        self._requests = requests
        self._fail = fail

    def note(self, sample: Sample, start: int, is_ended: bool) -> None:
        """A sample has tokens from `start` on, or has ended. Can be repeated."""
        if is_ended or sample.request.streamer is not None:
            self.due[sample] = None
        if not sample.request.is_followed:
            self.news.setdefault(sample, start)

    def take(self, news: dict[Sample, int]) -> StepOutput:
        """What `step` gives out of these samples."""
        output = StepOutput()
        add = output.tokens.append
        for sample, start in news.items():
            request = sample.request
            for token in sample.tokens[start:]:
                add(NewToken(request.id, sample.index, token))
            if sample.index in request.results:
                output.finished.append(request.results[sample.index])
        return output

    def withhold(self, request: Request) -> None:
        """Let `step` give out nothing of a request."""
        for sample in request.samples:
            self.news.pop(sample, None)

    def deliver(self) -> None:
        """Give streamers their tokens and make the results of samples that have ended. Calls users' objects."""
        while self.due:
            sample = next(iter(self.due))
            if sample.request.streamer is not None:
                self._put(sample)
            if sample.finish_reason is not None:
                self._finish(sample)
            self.due.pop(sample, None)

    def _put(self, sample: Sample) -> None:
        try:
            while sample.num_put < len(sample.tokens):
                token = sample.tokens[sample.num_put]
                sample.num_put += 1
                sample.request.streamer.put(torch.tensor([token]))
        except Exception as error:  # whatever a user's streamer raises
            sample.num_put = len(sample.tokens)
            if sample.finish_reason is None:
                self._fail(sample, describe(error))
            else:
                sample.error, sample.finish_reason = describe(error), "error"

    def _finish(self, sample: Sample) -> None:
        """Stages that can each be repeated: the result, the request's end, its streamer's end."""
        request = sample.request
        if sample.index not in request.results:
            text = self._decode(sample)
            request.results[sample.index] = _result(sample, text)
            self.num_cached += max(0, sample.num_cached)
        if not request.is_done:
            return
        if not request.is_followed:
            self.done[request.id] = request
            if len(self.done) > _KEPT_REQUESTS:
                self.done.pop(next(iter(self.done)))
        if self._requests.pop(request.id, None) is not None:
            self.num_prompt += len(request.prompt_ids)
        if request.streamer is not None and not request.is_stream_ended:
            request.is_stream_ended = True
            _end_stream(request.streamer, request.results[sample.index])

    def _decode(self, sample: Sample) -> str | None:
        if self.tokenizer is None:
            return None
        try:
            text: str = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            return text
        except Exception as error:  # whatever a user's tokenizer raises
            sample.error, sample.finish_reason = f"tokenizer.decode(): {describe(error)}", "error"
            return None


def _result(sample: Sample, text: str | None) -> Result:
    request, first = sample.request, sample.first_token
    assert sample.finish_reason is not None
    return Result(
        request_id=request.id,
        sample=sample.index,
        prompt_ids=request.prompt_ids,
        token_ids=sample.token_ids,
        text=text,
        finish_reason=sample.finish_reason,
        error=sample.error,
        logprobs=None if sample.settings.logprobs is None else sample.logprobs,
        num_cached_tokens=max(0, sample.num_cached),
        num_preemptions=sample.num_preemptions,
        seconds_to_first_token=None if first is None else first - request.arrival,
        seconds=time.monotonic() - request.arrival,
    )


def begin_stream(streamer: Any, ids: list[int]) -> None:
    """Give a streamer the prompt.

    Raises:
        InvalidArgumentError: it does not take it.
    """
    try:
        streamer.put(torch.tensor([ids]))
    except Exception as error:  # whatever a user's streamer raises
        raise InvalidArgumentError(
            f"streamer: expected one that takes the prompt, its put() raised {describe(error)}"
        ) from error


def _end_stream(streamer: Any, result: Result) -> None:
    try:
        streamer.end()
    except Exception as error:  # whatever a user's streamer raises
        text = f"streamer.end(): {describe(error)}"
        result.error = text if result.error is None else f"{result.error}; {text}"
