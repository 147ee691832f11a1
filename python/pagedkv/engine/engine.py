"""Engine: many generation requests over one model at once, with continuous batching over paged KV.

    with pagedkv.Engine(model, tokenizer) as engine:
        results = engine.generate(["The sea", "A longer prompt"], max_new_tokens=32)

A step admits what fits, computes one packed batch of decode tokens and prompt chunks, samples, and drops what is done.
It is a transaction: nothing of a sample changes until the step is decided for all, what is decided is recorded in a way
that can be repeated, and only then streamers and the tokenizer are called. Whatever is raised, each request goes on
with the tokens and the random stream that it had, or has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import IntegrityError, InvalidArgumentError, boolean, integer
from ..manager.hashing import encode
from .checks import check_batch, check_tokenizer, inner_model
from .outbox import Outbox, begin_stream
from .progress import generation_bar
from .requests import (
    Prompt,
    PromptError,
    Request,
    Sample,
    check_fit,
    check_logprobs,
    check_priority,
    check_prompts,
    check_seed,
    encode_prompt,
)
from .results import EngineStats, NewToken, Result, StepOutput
from .runner import Runner
from .sampling import Decision
from .scheduler import Scheduler
from .settings import Settings
from .stepping import Stepper
from .streams import Reader


class Engine:
    """Continuous batching over a transformers causal language model. Thread-safe.

    Args:
        model: its layers need no more per token than its position and the keys and values before it. Its weights and
            its other uses are left alone, but for calls in other threads while a step runs (those of other engines and
            of ``patch`` wait). A request whose model changes (weights, adapters, their scalings) ends with an error
            that names the change; with ``compile`` further ones are refused.
        tokenizer: for prompts and results as text; prompts can be token ids without one.
        num_blocks, memory: blocks of the pool, the null block included; or (not both) its bytes, or the fraction of
            free memory.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one forward.
        prefix_caching: prompts that begin like an earlier one reuse its blocks.
        compile: through torch.compile. On CPU every forward, with a frozen and packed copy of the weights; a model of
            30 layers takes about 100 s. On CUDA decode.
        cuda_graphs: True, False, or "auto": decode from captured graphs where the model is on CUDA.
        kv_dtype: float type of the stored keys and values; None: the type the model computes them in.
        watermark: fraction of the blocks that admissions leave free.
        num_host_blocks: preemption swaps to so many blocks of host memory instead of computing again.
        buckets: batch sizes that decode forwards are padded to, the last being max_num_seqs; default: powers of two.
        progress: show bars while decode is compiled or captured.

    Raises:
        UnsupportedModelError: the model needs more than (token, position, keys and values); the message says what.
        InvalidArgumentError, ValueError: a setting out of its range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        num_blocks: int | None = None,
        memory: int | float | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        prefix_caching: bool = True,
        compile: bool = False,
        cuda_graphs: bool | str = "auto",
        kv_dtype: torch.dtype | None = None,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        buckets: Seq[int] | None = None,
        progress: bool = False,
    ) -> None:
        max_num_seqs, max_num_batched_tokens = check_batch(max_num_seqs, max_num_batched_tokens)
        check_tokenizer(tokenizer)
        model = inner_model(model)
        _check_mode(model)
        self.model = model
        self.tokenizer = tokenizer
        self.runner = Runner(
            model,
            num_blocks=num_blocks,
            memory=memory,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            kv_dtype=kv_dtype,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
            compile=compile,
            cuda_graphs=cuda_graphs,
            buckets=buckets,
            progress=progress,
        )
        self.manager = self.runner.pool.manager
        self.scheduler = Scheduler(self.runner.pool, self.runner.tables, max_num_seqs, max_num_batched_tokens)
        self._requests: dict[int, Request] = {}
        self._stepper = Stepper(self.runner, self.scheduler, self._requests)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._outbox = Outbox(tokenizer, self._requests, self._fail)
        self._new_id = itertools.count().__next__
        self._lock = threading.RLock()
        self._busy = threading.Lock()  # held with the other one while requests and blocks change
        self._is_broken = False  # a change was interrupted, and what it left was not put right yet
        self._ended: dict[Sample, None] = {}  # to be taken out of the schedule
        self._counts = dict.fromkeys(("generated", "draft", "accepted"), 0)
        self._decided: tuple[list[Decision], dict[str, int]] = [], self._counts
        self._step_seconds = 0.0
        self._closed = False

    def __repr__(self) -> str:
        running, waiting, pool = len(self.scheduler.running), len(self.scheduler.waiting), self.manager.pool
        blocks = (
            f"{pool.num_usable - pool.num_free} of {pool.num_usable} blocks of {self.manager.block_size} tokens used"
        )
        sequences = f"{running} of {self.scheduler.max_num_seqs} sequences running, {waiting} waiting"
        state = ", closed" if self._closed else ""
        return f"{type(self).__name__}({type(self.model).__name__}, {sequences}, {blocks}{state})"

    # Requests.

    def add_request(
        self,
        prompt: Prompt,
        generation_config: GenerationConfig | None = None,
        *,
        priority: int = 0,
        cache_salt: Any = None,
        seed: int | None = None,
        logprobs: int | None = None,
        logits_processor: Seq[Any] = (),
        stopping_criteria: Seq[Any] = (),
        streamer: Any = None,
        **options: Any,
    ) -> int:
        """Queues a request; what is wrong with it is said now.

        Args:
            prompt: text, or token ids.
            generation_config, options: as for ``model.generate``: greedy, sampling, or prompt lookup with
                ``prompt_lookup_num_tokens``; ``num_return_sequences`` samples.
            priority: the larger is served first.
            cache_salt: only requests with equal salts share cached prefixes.
            seed: of the request's own random stream (sample i: seed + i), up to 2**63 - 1; None: drawn from torch's.
            logprobs: keep the log-probabilities of each token and of so many likeliest ones.
            logits_processor, stopping_criteria: transformers' objects, of this request alone.
            streamer: a transformers streamer, called with every token of a request with one sample.

        Returns:
            The request's id.

        Raises:
            InvalidArgumentError: no tokens, ids outside the vocabulary, settings that are not served, or a request that
                can never fit; nothing was added.
        """
        request = self._prepare(
            prompt,
            generation_config,
            False,
            priority=priority,
            cache_salt=cache_salt,
            seed=seed,
            logprobs=logprobs,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            **options,
        )
        try:
            self._start([request])
            return request.id
        except BaseException:
            self._leave([request])
            raise

    def _prepare(
        self,
        prompt: Prompt,
        generation_config: GenerationConfig | None,
        is_followed: bool,
        /,
        *,
        priority: int = 0,
        cache_salt: Any = None,
        seed: int | None = None,
        logprobs: int | None = None,
        logits_processor: Seq[Any] = (),
        stopping_criteria: Seq[Any] = (),
        streamer: Any = None,
        **options: Any,
    ) -> Request:
        """A request that the engine does not know yet; raises what `add_request` raises."""
        ids = encode_prompt(prompt, self.tokenizer, self._vocabulary)
        processors = logits_processor, stopping_criteria
        logprobs = None if logprobs is None else check_logprobs(logprobs, self._vocabulary)
        settings = Settings(
            self.model, self.tokenizer, generation_config, ids, *processors, logprobs=logprobs, **options
        )
        check_fit(self.runner, self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens, len(ids), settings)
        check_priority(priority)
        encode(cache_salt)  # raises for what is no plain value
        if streamer is not None and settings.num_samples > 1:
            raise InvalidArgumentError(f"streamer: expected a request with one sample, got {settings.num_samples}")
        seed = int(torch.randint(2**62, ())) if seed is None else check_seed(seed, settings.num_samples)
        request = Request(self._new_id(), ids, settings, cache_salt, streamer, is_followed, time.monotonic())
        for index in range(settings.num_samples):
            generator = torch.Generator(self.runner.device).manual_seed(seed + index)
            rank, told = (-priority, request.id), (len(ids), False)
            request.samples.append(
                Sample(self.scheduler.new_id(), request, index, rank, list(ids), generator, told=told)
            )
        request.samples[0].num_forks = settings.num_samples - 1
        return request

    def _start(self, requests: list[Request]) -> None:
        """Queues requests; if anything is raised none of them. Does nothing where their consumer has left meanwhile."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if any(request.is_left for request in requests):
                return
            identity = self._stepper.identity()
            for request in requests:
                request.identity = identity
                request.is_private = identity.keys is None or not self.runner.pool.prefix_caching
                if request.streamer is not None:
                    begin_stream(request.streamer, request.prompt_ids)
            try:
                self._change(lambda: self._queue(requests))
            except BaseException:
                self._change(lambda: self._withdraw(requests))
                raise

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            self._requests[request.id] = request
            self.scheduler.add(request.samples[0])

    def _withdraw(self, requests: list[Request]) -> None:
        """Takes back requests that no step has seen, without a result."""
        for request in requests:
            if self._requests.pop(request.id, None) is not None:
                self.scheduler.remove(request.samples[0])

    def _leave(self, requests: list[Request]) -> None:
        """Their consumer is gone: ends what is not done, and gives out nothing of them."""
        with self._lock:
            for request in requests:
                request.is_left = True
            self._abort([request for request in requests if request.id in self._requests])
            for request in requests:
                self._outbox.withhold(request)

    def abort(self, request_id: int) -> bool:
        """Ends a request and frees its blocks, also from a callback; False if it is not there any more."""
        request_id = integer("request_id", request_id)
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or not request.scheduled():
                return False
            self._abort([request])
            return True

    def _abort(self, requests: list[Request]) -> None:
        def end() -> None:
            for request in requests:
                for sample in request.samples:
                    self._end(sample, "abort")

        if requests:
            self._change(end)
        self._deliver()

    # A step.

    def step(self) -> StepOutput:
        """One forward. Gives out what has come of requests of `add_request` and was not given out before: by this step,
        and by those that `generate` and streams have run.

        Whatever is raised, by the model, a callback or the keyboard, each request goes on with the tokens and the
        random stream that it has, or has ended: the next step goes on, and gives out what this one could not.
        """
        news: dict[Sample, int] = {}
        try:
            with self._lock:
                self._step()
                news, self._outbox.news = self._outbox.news, news
                return self._outbox.take(news)
        except BaseException:
            with self._lock:
                self._outbox.news = {**self._outbox.news, **news}
            raise

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and `step` has nothing left to give out."""
        return not (self._requests or self._outbox.due or self._outbox.news)

    def _step(self) -> None:
        with self._lock:
            if self._busy.locked():
                raise RuntimeError("step: called by a logits processor or stopping criterion, inside a step")
            _check_mode(self.model)
            start = time.monotonic()
            self._deliver()  # what an interrupted call has left
            try:
                self._change(self._advance)
            finally:
                self._step_seconds += time.monotonic() - start
            self._deliver()

    def _step_unless(self, is_enough: Callable[[], bool]) -> None:
        """A step, unless another consumer's step has brought enough meanwhile."""
        with self._lock:
            if not is_enough():
                self._step()

    def _change(self, work: Callable[[], None]) -> None:
        """Changes requests and blocks. What is raised leaves them in order: decided tokens stay, the rest is computed
        again. A callback's call joins the change that it came from."""
        with self._lock:
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
            except BaseException:
                self._recover()
                raise

    def _advance(self) -> None:
        with torch.inference_mode():
            decisions = self._stepper.decide()
        counts = {
            "generated": self._counts["generated"] + sum(len(decision.tokens) for decision in decisions),
            "draft": self._counts["draft"] + sum(decision.num_drafted for decision in decisions),
            "accepted": self._counts["accepted"] + sum(decision.num_accepted for decision in decisions),
        }
        self._decided = decisions, counts  # from here on the step stands
        self._record()
        self._stepper.confirm(decisions)

    def _record(self) -> None:
        """Takes what is decided into the samples. Can be repeated."""
        decisions, counts = self._decided
        for decision in decisions:
            sample = decision.sample
            if sample.finish_reason not in (None, decision.reason):
                continue  # aborted by a callback of this step
            sample.tokens[decision.start :] = decision.tokens
            sample.logprobs[decision.start - len(sample.request.prompt_ids) :] = decision.logprobs
            if decision.random_state is not None:
                sample.random_state = decision.random_state
            if decision.tokens:
                sample.is_pending = True
                if sample.first_token is None:
                    sample.first_token = time.monotonic()
            if decision.reason is None:
                sample.told = len(sample.tokens), False
                self._outbox.note(sample, decision.start)
            else:
                self._end(sample, decision.reason, decision.error, decision.start)
        self._counts = counts
        self._decided = [], counts

    def _end(self, sample: Sample, reason: str, error: str | None = None, start: int | None = None) -> None:
        """Lets a sample end, unless it has. Can be repeated."""
        if sample.finish_reason is None:
            self._outbox.note(sample, len(sample.tokens) if start is None else start)
            self._ended[sample] = None
            sample.finish_reason, sample.error, sample.told = reason, error, (len(sample.tokens), True)

    def _fail(self, sample: Sample, error: str) -> None:
        self._change(lambda: self._end(sample, "error", error))

    def _settle(self) -> None:
        """Takes what has ended out of the schedule, and its blocks."""
        for sample in self._ended:
            if sample.finish_reason is not None:
                self.scheduler.remove(sample)
        self._ended.clear()

    def _recover(self) -> None:
        """Puts right what an interrupted change has left. Can be repeated."""
        self._record()
        for request in self._requests.values():
            for sample in request.samples:
                sample.rewind()
        self.scheduler.reset([sample for request in self._requests.values() for sample in request.scheduled()])
        self._ended.clear()
        self._is_broken = False

    def _deliver(self) -> None:
        """Calls users' objects, unless one of them has called: then its caller does."""
        if not self._busy.locked():
            self._outbox.deliver()

    # Consumers.

    def generate(
        self,
        prompts: Seq[Prompt],
        generation_config: GenerationConfig | Seq[GenerationConfig] | None = None,
        *,
        progress: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> list[Result]:
        """Runs requests to their ends.

        Args:
            prompts: one request each. generation_config: for all, or one for each.
            progress: show a bar with tokens per second, running and waiting sequences, and the share of blocks in use.
            seed: the i-th request gets seed + 1000 * i.
            options: of `add_request`, for all; a streamer takes one prompt.

        Returns:
            One result per sample, prompt after prompt. A request that fails has finish reason "error".

        Raises:
            InvalidArgumentError: a prompt, named by its index, or a setting is refused; none was started then.
        """
        check_prompts(prompts)
        boolean("progress", progress)
        configs: list[Any] = [generation_config] * len(prompts)
        if isinstance(generation_config, list | tuple):
            configs = list(generation_config)
        if len(configs) != len(prompts):
            raise InvalidArgumentError(f"generation_config: expected {len(prompts)} configs, got {len(configs)}")
        if options.get("streamer") is not None and len(prompts) > 1:
            raise InvalidArgumentError(f"streamer: expected one prompt, got {len(prompts)}")
        seed = None if seed is None else integer("seed", seed, 0)
        requests = self._prepare_all(prompts, configs, seed, options)
        try:
            self._start(requests)
            self._run_all(requests, progress)
            return [request.results[index] for request in requests for index in sorted(request.results)]
        finally:
            self._leave(requests)

    def _prepare_all(
        self, prompts: Seq[Prompt], configs: list[Any], seed: int | None, options: dict[str, Any]
    ) -> list[Request]:
        """A request of each prompt; an error of one prompt alone says which."""
        requests = []
        for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
            own_seed = None if seed is None else seed + 1000 * index
            try:
                requests.append(self._prepare(prompt, config, True, seed=own_seed, **options))
            except InvalidArgumentError as error:
                if isinstance(error, PromptError) or any(config is not configs[0] for config in configs):
                    raise InvalidArgumentError(f"prompts[{index}]: {error}") from error
                raise
        return requests

    def _run_all(self, requests: list[Request], progress: bool) -> None:
        total = sum(len(request.samples) for request in requests)
        start, generated = time.monotonic(), self._counts["generated"]
        with generation_bar(total, progress) as show:
            while not all(request.is_done for request in requests):
                self._step()
                if progress:
                    speed = (self._counts["generated"] - generated) / (time.monotonic() - start)
                    used = 1 - self.manager.num_free_blocks / self.manager.pool.num_usable
                    running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
                    figures = f"{speed:.0f} tokens/s, {running} running, {waiting} waiting, KV {used:.0%}"
                    show(sum(len(request.results) for request in requests), figures)

    def results(self, request_id: int) -> list[Result]:
        """Runs steps until a request that `add_request` has added is done.

        Returns:
            Its results, one per sample, whether `step` gave them out before or not; it does not from here on. They can
            be asked for until 1,024 later requests are done.

        Raises:
            InvalidArgumentError: no such request.
        """
        request_id = integer("request_id", request_id)
        request = self._requests.get(request_id) or self._outbox.done.get(request_id)
        if request is None or request.is_followed:
            raise InvalidArgumentError(f"request_id: expected a request whose results are still here, got {request_id}")
        while not request.is_done:
            self._step_unless(lambda: request.is_done)
        with self._lock:
            self._deliver()  # what an interrupted call has left
            self._outbox.withhold(request)
        return [request.results[index] for index in sorted(request.results)]

    def stream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Iterator[NewToken]:
        """Yields the tokens of one request as they are sampled, with their text. Closing the iterator aborts it.

        The texts joined are `Result.text`, whatever the tokenizer; where it is aborted an incomplete
        character may be missing.

        Raises:
            InvalidArgumentError: the request is refused. RuntimeError: it has failed.
        """
        request = self._prepare(prompt, generation_config, True, **options)
        reader = Reader(request, self.tokenizer)
        try:
            self._start([request])
            while not _is_read(request, reader):
                yield from reader.read()
                self._step_unless(lambda: request.is_done or reader.has_news)
            yield from reader.read()
            _raise_error(request)
        finally:
            self._leave([request])

    async def astream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> AsyncIterator[NewToken]:
        """`stream` for asyncio: steps run in a thread, for all consumers that wait. Cancelling it aborts it."""
        request = await asyncio.to_thread(self._prepare, prompt, generation_config, True, **options)
        reader = Reader(request, self.tokenizer)
        try:
            await asyncio.to_thread(self._start, [request])
            while not _is_read(request, reader):
                for token in reader.read():
                    yield token
                await asyncio.to_thread(self._step_unless, lambda: request.is_done or reader.has_news)
            for token in reader.read():
                yield token
            _raise_error(request)
        finally:
            if not request.is_done:  # in a thread: the lock is not free before the end of a step
                await asyncio.shield(asyncio.to_thread(self._leave, [request]))

    # Accounts.

    def stats(self) -> EngineStats:
        with self._lock:
            counts, outbox = self._counts, self._outbox
            prompts = sum(len(request.prompt_ids) for request in self._requests.values())
            return EngineStats(
                num_running=len(self.scheduler.running) + len(outbox.due),
                num_waiting=len(self.scheduler.waiting),
                num_steps=self._stepper.num_steps,
                num_prompt_tokens=outbox.num_prompt + prompts,
                num_cached_tokens=outbox.num_cached,
                num_generated_tokens=counts["generated"],
                num_preemptions=self.manager.num_preemptions,
                num_draft_tokens=counts["draft"],
                num_accepted_tokens=counts["accepted"],
                acceptance_rate=counts["accepted"] / counts["draft"] if counts["draft"] else 0.0,
                step_seconds=self._step_seconds,
                forward_seconds=self._stepper.forward_seconds,
                kv=self.manager.stats(self.runner.pool.block_bytes),
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, references and tables agree and only live requests hold any."""
        with self._lock:
            self.manager.check_integrity()
            known = {seq.seq_id for request in self._requests.values() for seq in request.scheduled()}
            if known != set(self.manager.sequences):
                held = list(self.manager.sequences)
                raise IntegrityError(f"the manager has sequences {held}, expected {sorted(known)}")

    def close(self) -> None:
        """Aborts what is left; the engine takes no more requests."""
        with self._lock:
            self._closed = True
            self._abort(list(self._requests.values()))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_read(request: Request, reader: Reader) -> bool:
    return request.is_done and not reader.has_news  # in this order: a request that is done gets no more tokens


def _raise_error(request: Request) -> None:
    for result in request.results.values():
        if result.error is not None:
            raise RuntimeError(f"request {request.id}: {result.error}")


def _check_mode(model: Any) -> None:
    if model.training:
        raise InvalidArgumentError("model: expected one in evaluation mode, call model.eval()")
