"""Engine: many generation requests over one model at once, with continuous batching over paged KV.

    with pagedkv.Engine(model, tokenizer) as engine:
        results = engine.generate(["The sea", "A longer prompt"], max_new_tokens=32)

A step admits what fits, computes one packed batch of decode tokens and prompt chunks, samples, and drops what is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..errors import IntegrityError, InvalidArgumentError, boolean, integer
from .config import EngineConfig, check_tokenizer, inner_model
from .intake import Intake, Prompt
from .ledger import Ledger
from .requests import Request, Sample
from .results import EngineStats, NewToken, Result, StepOutput
from .runner import Runner
from .scheduler import Scheduler
from .streams import Reader


class Engine:
    """Continuous batching over a transformers causal language model. Thread-safe.

    Args:
        model: its layers need no more per token than its position and the keys and values before it. Its weights and
            its other uses are left alone, but for calls in other threads while a step runs (those of other engines and
            of ``patch`` wait). A request whose model changes (weights, adapters, their scalings) ends with an error
            that names the change; with ``compile`` further ones are refused.
        tokenizer: for prompts and results as text; prompts can be token ids without one.
        others: the fields of :class:`pagedkv.engine.EngineConfig`, which explains and checks them.

    Raises:
        UnsupportedModelError: the model needs more than (token, position, keys and values); the message says what.
        InvalidArgumentError, ValueError: a setting out of its range.

    Example:
        >>> with pagedkv.Engine(model, num_blocks=64) as engine:
        ...     results = engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=4)
        >>> [len(result.token_ids) for result in results]
        [4, 4]
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
        kv_dtype: torch.dtype | str | None = None,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        buckets: Seq[int] | None = None,
        progress: bool = False,
    ) -> None:
        config = EngineConfig(
            num_blocks=num_blocks,
            memory=memory,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            compile=compile,
            cuda_graphs=cuda_graphs,
            kv_dtype=kv_dtype,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
            buckets=buckets,
            progress=progress,
        )
        check_tokenizer(tokenizer)
        self.model = inner_model(model)
        self.tokenizer = tokenizer
        self.config = config
        self.runner = Runner(self.model, config)
        self.manager = self.runner.pool.manager
        self.scheduler = Scheduler(self.runner.pool, self.runner.tables, config)
        self._intake = Intake(self.runner, config, tokenizer)
        self._ledger = Ledger(self.runner, self.scheduler, tokenizer)

    def __repr__(self) -> str:
        running, waiting, pool = len(self.scheduler.running), len(self.scheduler.waiting), self.manager.pool
        blocks = (
            f"{pool.num_usable - pool.num_free} of {pool.num_usable} blocks of {self.manager.block_size} tokens used"
        )
        sequences = f"{running} of {self.scheduler.max_num_seqs} sequences running, {waiting} waiting"
        state = ", closed" if self._ledger.is_closed else ""
        return f"{type(self).__name__}({type(self.model).__name__}, {sequences}, {blocks}{state})"

    # Requests.

    def add_request(self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any) -> int:
        """Queue a request; what is wrong with it is said now.

        Args:
            prompt: text, or token ids.
            generation_config: as for ``model.generate``: greedy, sampling, or prompt lookup with
                ``prompt_lookup_num_tokens``; ``num_return_sequences`` samples.
            options: settings as for ``model.generate``, and:

                - priority=0: the larger is served first.
                - cache_salt=None: only requests with equal salts share cached prefixes.
                - seed=None: of the request's own random stream (sample i: seed + i), up to 2**63 - 1; None: drawn from
                  torch's. On CPU it gives the tokens that ``generate`` gives.
                - logprobs=None: keep the log-probabilities of each token and of so many likeliest ones.
                - logits_processor, stopping_criteria: lists of transformers' objects, of this request alone.
                - streamer=None: a transformers streamer, called with every token of a request with one sample.

        Returns:
            The request's id.

        Raises:
            InvalidArgumentError: no tokens, ids outside the vocabulary, settings that are not served, or a request that
                can never fit; nothing was added.
        """
        request = self._intake.prepare(prompt, generation_config, False, **options)
        try:
            self._ledger.start([request])
            return request.id
        except BaseException:  # an interrupt too: its caller gets no id to abort it by
            self._ledger.leave([request])
            raise

    def abort(self, request_id: int) -> bool:
        """End a request and free its blocks, also from a callback; False if it is not there any more."""
        request_id = integer("request_id", request_id)
        with self._ledger.lock:
            request = self._ledger.requests.get(request_id)
            if request is None or not request.scheduled():
                return False
            self._ledger.end_all([request])
            return True

    def step(self) -> StepOutput:
        """One forward. Give out what has come of requests of `add_request` and was not given out before: by this step,
        and by those that `generate` and streams have run.

        Whatever is raised, by the model, a callback or the keyboard, each request goes on with the tokens and the
        random stream that it has, or has ended: the next step goes on, and gives out what this one could not.
        """
        ledger, news = self._ledger, dict[Sample, int]()
        try:
            with ledger.lock:
                ledger.step()
                news, ledger.outbox.news = ledger.outbox.news, news
                return ledger.outbox.take(news)
        except BaseException:  # an interrupt too: the next step gives out what this one could not
            with ledger.lock:
                ledger.outbox.news = {**ledger.outbox.news, **news}
            raise

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and `step` has nothing left to give out."""
        ledger = self._ledger
        return not (ledger.requests or ledger.outbox.due or ledger.outbox.news)

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
        """Run requests to their ends.

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
        boolean("progress", progress)
        requests = self._intake.prepare_all(prompts, generation_config, seed, options)
        try:
            self._ledger.start(requests)
            self._run(requests, progress)
            return [request.results[index] for request in requests for index in sorted(request.results)]
        finally:
            self._ledger.leave(requests)

    def _run(self, requests: list[Request], progress: bool) -> None:
        """Step until these requests are done."""
        ledger, total = self._ledger, sum(len(request.samples) for request in requests)
        start, generated = time.monotonic(), ledger.counts["generated"]
        shape = "{n_fmt}/{total_fmt} |{bar}| {elapsed} {desc}"
        with tqdm(total=total, disable=not progress, unit="seq", bar_format=shape) as bar:
            while not all(request.is_done for request in requests):
                ledger.step()
                if progress:
                    speed = (ledger.counts["generated"] - generated) / (time.monotonic() - start)
                    used = 1 - self.manager.num_free_blocks / self.manager.pool.num_usable
                    running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
                    figures = f"{speed:.0f} tokens/s, {running} running, {waiting} waiting, KV {used:.0%}"
                    bar.set_description_str(figures, refresh=False)
                    bar.update(sum(len(request.results) for request in requests) - bar.n)

    def results(self, request_id: int) -> list[Result]:
        """Run steps until a request that `add_request` has added is done.

        Returns:
            Its results, one per sample, whether `step` gave them out before or not; it does not from here on. They can
            be asked for until 1,024 later requests are done.

        Raises:
            InvalidArgumentError: no such request.
        """
        request_id = integer("request_id", request_id)
        request = self._ledger.requests.get(request_id) or self._ledger.outbox.done.get(request_id)
        if request is None or request.is_followed:
            raise InvalidArgumentError(f"request_id: expected a request whose results are still here, got {request_id}")
        while not request.is_done:
            self._ledger.step_unless(lambda: request.is_done)
        with self._ledger.lock:
            self._ledger.deliver()  # what an interrupted call has left
            self._ledger.outbox.withhold(request)
        return [request.results[index] for index in sorted(request.results)]

    def stream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Iterator[NewToken]:
        """Yield the tokens of one request as they are sampled, with their text. Closing the iterator aborts it.

        The texts joined are `Result.text`, whatever the tokenizer; where it is aborted an incomplete
        character may be missing.

        Raises:
            InvalidArgumentError: the request is refused. RuntimeError: it has failed, or the engine was closed.
        """
        request = self._intake.prepare(prompt, generation_config, True, **options)
        reader = Reader(request, self.tokenizer)
        try:
            self._ledger.start([request])
            while not _is_read(request, reader):
                yield from reader.read()
                self._ledger.step_unless(lambda: request.is_done or reader.has_news)
            yield from reader.read()
            _raise_error(request)
        finally:
            self._ledger.leave([request])

    async def astream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> AsyncIterator[NewToken]:
        """`stream` for asyncio: steps run in a thread, for all consumers that wait. Cancelling it aborts it."""
        request = await asyncio.to_thread(self._intake.prepare, prompt, generation_config, True, **options)
        reader = Reader(request, self.tokenizer)
        try:
            await asyncio.to_thread(self._ledger.start, [request])
            while not _is_read(request, reader):
                for token in reader.read():
                    yield token
                await asyncio.to_thread(self._ledger.step_unless, lambda: request.is_done or reader.has_news)
            for token in reader.read():
                yield token
            _raise_error(request)
        finally:
            if not request.is_done:  # in a thread: the lock is not free before the end of a step
                await asyncio.shield(asyncio.to_thread(self._ledger.leave, [request]))

    # Accounts.

    def stats(self) -> EngineStats:
        with self._ledger.lock:
            counts, outbox = self._ledger.counts, self._ledger.outbox
            prompts = sum(len(request.prompt_ids) for request in self._ledger.requests.values())
            return EngineStats(
                num_running=len(self.scheduler.running) + len(outbox.due),
                num_waiting=len(self.scheduler.waiting),
                num_steps=self._ledger.stepper.num_steps,
                num_prompt_tokens=outbox.num_prompt + prompts,
                num_cached_tokens=outbox.num_cached,
                num_generated_tokens=counts["generated"],
                num_preemptions=self.manager.num_preemptions,
                num_draft_tokens=counts["draft"],
                num_accepted_tokens=counts["accepted"],
                acceptance_rate=counts["accepted"] / counts["draft"] if counts["draft"] else 0.0,
                step_seconds=self._ledger.step_seconds,
                forward_seconds=self._ledger.stepper.forward_seconds,
                kv=self.manager.stats(self.runner.pool.block_bytes),
            )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, references and tables agree and only live requests hold any."""
        with self._ledger.lock:
            self._ledger.change(lambda: None)  # puts right what an interrupted recovery has left
            self.manager.check_integrity()
            known = {seq.seq_id for request in self._ledger.requests.values() for seq in request.scheduled()}
            if known != set(self.manager.sequences):
                held = list(self.manager.sequences)
                raise IntegrityError(f"the manager has sequences {held}, expected {sorted(known)}")

    def close(self) -> None:
        """Abort what is left, with an error; the engine takes no more requests, and its streams raise."""
        with self._ledger.lock:
            self._ledger.is_closed = True
            self._ledger.end_all(list(self._ledger.requests.values()), "the engine was closed")

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
