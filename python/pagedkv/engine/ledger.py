"""Which requests there are and what has become of them. Every change of them is a transaction.

Nothing of a sample changes until a step is decided for all, what is decided is recorded in a way that can be repeated,
and only then streamers and the tokenizer are called. Whatever is raised, each request goes on with the tokens and the
random stream that it had, or has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .config import check_mode
from .outbox import Outbox, begin_stream
from .requests import Request, Sample
from .runner import Runner
from .sampling import Decision
from .scheduler import Scheduler
from .stepping import Stepper


class Ledger:
    """The requests of an engine, and its steps.

    Args:
        runner: of the model. tokenizer: for the text of results. scheduler: without requests.

    Attributes:
        requests: those that are not done, by id.
        outbox: what is due to streamers and callers.
        lock: held by every method, so that threads take turns; a caller that needs several of them holds it too.
        counts: tokens generated, drafted, accepted.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, tokenizer: Any) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.stepper = Stepper(runner, scheduler, self.requests)
        self.outbox = Outbox(tokenizer, self.requests, self._fail)
        self.lock = threading.RLock()
        self.counts = dict.fromkeys(("generated", "draft", "accepted"), 0)
        self.step_seconds = 0.0
        self.is_closed = False
        self._busy = threading.Lock()  # held with the other one while requests and blocks change
        self._is_broken = False  # a change was interrupted, and what it left was not put right yet
        self._ended: dict[Sample, None] = {}  # to be taken out of the schedule
        self._decided: tuple[list[Decision], dict[str, int]] = [], self.counts

    # Requests.

    def start(self, requests: list[Request]) -> None:
        """Queue requests; if anything is raised none of them. Do nothing where their consumer has left meanwhile."""
        with self.lock:
            if self.is_closed:
                raise RuntimeError("the engine is closed")
            if any(request.is_left for request in requests):
                return
            identity = self.stepper.identity()
            for request in requests:
                request.identity = identity
                request.is_private = identity.keys is None or not self.scheduler.pool.prefix_caching
                if request.streamer is not None:
                    begin_stream(request.streamer, request.prompt_ids)
            try:
                self.change(lambda: self._queue(requests))
            except BaseException:  # an interrupt too: a caller that gets no id can not abort
                self.change(lambda: self._withdraw(requests))
                raise

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            self.requests[request.id] = request
            self.stepper.fresh.append(request)
            self.scheduler.add(request.samples[0])

    def _withdraw(self, requests: list[Request]) -> None:
        """Take back requests that no step has seen, without a result."""
        for request in requests:
            if self.requests.pop(request.id, None) is not None:
                self.scheduler.remove(request.samples[0])

    def leave(self, requests: list[Request]) -> None:
        """Their consumer is gone: ends what is not done, and gives out nothing of them."""
        with self.lock:
            for request in requests:
                request.is_left = True
            self.end_all([request for request in requests if request.id in self.requests])
            for request in requests:
                self.outbox.withhold(request)

    def end_all(self, requests: list[Request], error: str | None = None) -> None:
        """Abort requests. error: for their results, where that was not their caller's wish."""

        def end() -> None:
            for request in requests:
                for sample in request.samples:
                    self._end(sample, "abort", error)

        if requests:
            self.change(end)
        self.deliver()

    # A step.

    def step(self) -> None:
        """One forward, and what it brings to streamers and results."""
        with self.lock:
            if self._busy.locked():
                raise RuntimeError("step: called by a logits processor or stopping criterion, inside a step")
            check_mode(self.stepper.runner.model)
            start = time.monotonic()
            self.deliver()  # what an interrupted call has left
            try:
                self.change(self._advance)
            finally:
                self.step_seconds += time.monotonic() - start
            self.deliver()

    def step_unless(self, is_enough: Callable[[], bool]) -> None:
        """A step, unless another consumer's step has brought enough meanwhile."""
        with self.lock:
            if not is_enough():
                self.step()

    def change(self, work: Callable[[], None]) -> None:
        """Change requests and blocks. What is raised leaves them in order: decided tokens stay, the rest is computed
        again. A callback's call joins the change that it came from."""
        with self.lock:
            if self._busy.locked():
                work()
                return
            try:
                with self._busy:
                    if self._is_broken:
                        self._recover()
                    self._is_broken = True
                    work()
                    self._settle()
                    self._is_broken = False
            except BaseException:  # an interrupt too: what it has left must not be seen
                self._recover()
                raise

    def _advance(self) -> None:
        with torch.inference_mode():
            decisions = self.stepper.decide()
        counts, drafted = self.counts.copy(), [decision for decision in decisions if decision.num_drafted]
        counts["generated"] += sum([len(decision.tokens) for decision in decisions])
        for decision in drafted:
            counts["draft"] += decision.num_drafted
            counts["accepted"] += decision.num_accepted
        self._decided = decisions, counts  # from here on the step stands
        self._record()
        self.stepper.confirm(drafted)

    def _record(self) -> None:
        """Take what is decided into the samples. Can be repeated."""
        (decisions, counts), now = self._decided, time.monotonic()
        for decision in decisions:
            sample, start, reason = decision.sample, decision.start, decision.reason
            if sample.finish_reason is not None and sample.finish_reason != reason:
                continue  # aborted by a callback of this step
            if decision.tokens:
                sample.tokens[start:] = decision.tokens
                sample.is_pending = True
                if sample.first_token is None:
                    sample.first_token = now
                if decision.logprobs is not None:
                    sample.logprobs[start - len(sample.request.prompt_ids) :] = decision.logprobs
                if decision.random_state is not None:
                    sample.random_state = decision.random_state
            if reason is None:
                sample.told = len(sample.tokens), False
                self.outbox.note(sample, start, False)
            else:
                self._end(sample, reason, decision.error, start)
        self.counts = counts
        self._decided = [], counts

    def _end(self, sample: Sample, reason: str, error: str | None = None, start: int | None = None) -> None:
        """Let a sample end, unless it has. Can be repeated."""
        if sample.finish_reason is None:
            self.outbox.note(sample, len(sample.tokens) if start is None else start, True)
            self._ended[sample] = None
            sample.finish_reason, sample.error, sample.told = reason, error, (len(sample.tokens), True)

    def _fail(self, sample: Sample, error: str) -> None:
        self.change(lambda: self._end(sample, "error", error))

    def _settle(self) -> None:
        """Take what has ended out of the schedule, and its blocks."""
        for sample in self._ended:
            if sample.finish_reason is not None:
                self.scheduler.remove(sample)
        self._ended.clear()

    def _recover(self) -> None:
        """Put right what an interrupted change has left. Can be repeated."""
        self._record()
        for request in self.requests.values():
            for sample in request.samples:
                sample.rewind()
        self.scheduler.reset([sample for request in self.requests.values() for sample in request.scheduled()])
        self._ended.clear()
        self._is_broken = False

    def deliver(self) -> None:
        """Call users' objects, unless one of them has called: then its caller does."""
        if not self._busy.locked():
            self.outbox.deliver()
