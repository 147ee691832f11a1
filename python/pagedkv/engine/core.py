"""The step of the engine: schedule, one forward, sample, and drop what is done."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import IntegrityError, InvalidArgumentError, integer
from ..hf.identity import Identity
from ..manager.hashing import encode
from .checks import check_batch, check_tokenizer, inner_model
from .requests import Prompt, Record, Request, check_fit, check_logprobs, check_priority, check_seed, encode_prompt
from .results import EngineStats, NewToken, Result, StepOutput
from .runner import Runner
from .sampling import Choice, Settings, sample
from .scheduler import Scheduler, Sequence


class EngineCore:
    """Requests and steps of :class:`pagedkv.Engine`, which has the arguments."""

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
        self.scheduler = Scheduler(self.manager, self.runner.tables, max_num_seqs, max_num_batched_tokens)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._watch = self.runner.patch.watch
        self._watch.learn()
        self._frozen = self._watch.inspect() if self.runner.is_frozen else None
        self._identity: Identity | None = None  # during `generate`, for all of its prompts
        self._open()

    def _open(self) -> None:
        """No requests, and accounts that begin at 0."""
        self._requests: dict[int, Request] = {}
        self._new_id = itertools.count().__next__
        self._lock = threading.RLock()
        self._output = StepOutput()
        self._counts = dict.fromkeys(("steps", "prompt", "cached", "generated", "draft", "accepted"), 0)
        self._seconds = {"step": 0.0, "forward": 0.0}
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
        ids = encode_prompt(prompt, self.tokenizer, self._vocabulary)
        processors = logits_processor, stopping_criteria
        logprobs = None if logprobs is None else check_logprobs(logprobs, self._vocabulary)
        settings = Settings(
            self.model, self.tokenizer, generation_config, ids, *processors, logprobs=logprobs, **options
        )
        check_fit(self.runner, self.scheduler, len(ids), settings)
        check_priority(priority)
        encode(cache_salt)  # raises for what is no plain value
        if streamer is not None and settings.num_samples > 1:
            raise InvalidArgumentError(f"streamer: expected a request with one sample, got {settings.num_samples}")
        seed = int(torch.randint(2**62, ())) if seed is None else check_seed(seed, settings.num_samples)
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            identity = self._current_identity()
            if streamer is not None:
                _begin_stream(streamer, ids)
            is_private = identity.keys is None or not self.runner.pool.prefix_caching
            request = Request(self._new_id(), ids, streamer, time.monotonic(), identity, is_private)
            self._queue(request, settings, priority, seed, cache_salt)
            return request.id

    def _current_identity(self) -> Identity:
        """Of the model, under which a request is added."""
        now = self._identity or self.runner.patch.follow_model(self.model)
        if self._frozen is not None and (changes := self._frozen.changes(now, self.runner.not_frozen)):
            raise InvalidArgumentError(
                f"model: expected what was compiled or captured, got a changed one ({changes}); make a new Engine"
            )
        return now

    def _queue(self, request: Request, settings: Settings, priority: int, seed: int, cache_salt: Any) -> None:
        for index in range(settings.num_samples):
            generator = torch.Generator(self.runner.device).manual_seed(seed + index)
            seq = Sequence(self.scheduler.new_id(), (-priority, request.id), list(request.prompt_ids), settings)
            seq.record = Record(request, index, generator, [])
            request.live[index] = seq
        first = request.live[0]
        first.num_forks = settings.num_samples - 1
        self.scheduler.add(first, cache_salt, request.identity.keys or ())
        if request.is_private:
            self.scheduler.make_private(first)
        self._requests[request.id] = request
        self._counts["prompt"] += len(request.prompt_ids)

    def _withdraw(self, request: Request) -> None:
        """Takes back a request that no step has seen, without a result."""
        self.scheduler.remove(request.live[0])
        del self._requests[request.id]
        self._counts["prompt"] -= len(request.prompt_ids)

    def abort(self, request_id: int) -> bool:
        """Ends a request and frees its blocks, also from a callback; False if it is not there any more."""
        request_id = integer("request_id", request_id)
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            for seq in list(request.live.values()):
                self._finish(seq, "abort")
            return True

    # Steps.

    def step(self) -> StepOutput:
        """One forward: what was sampled in it, and what is finished.

        An exception out of the model, or a KeyboardInterrupt, leaves every request queued with the tokens it has: the
        next step goes on.
        """
        with self._lock, torch.inference_mode():
            _check_mode(self.model)
            start = time.monotonic()
            output = self._output
            try:
                self._step()
            except BaseException:
                self.scheduler.reset([seq for request in self._requests.values() for seq in request.scheduled()])
                raise
            finally:
                self._seconds["step"] += time.monotonic() - start
            self._output = StepOutput()
            return output

    def _step(self) -> None:
        scheduler = self.scheduler
        for seq in list(scheduler.running):
            if seq.is_pending and seq.settings.lookup is not None:
                self._draft(seq)
        if not scheduler.schedule():
            if scheduler.waiting:
                for seq in list(scheduler.waiting[0].record.request.live.values()):
                    self._finish(seq, "error", "its blocks could not be granted in an empty pool")
            return
        batch = list(scheduler.running)
        works = [seq.work for seq in batch]
        is_decode = all(work == 1 for work in works) and not any(seq.draft for seq in batch)
        logits = self._forward(batch, works, is_decode)
        if self._end_changed(batch):
            return
        if is_decode:
            self.manager.commit_step([seq.seq_id for seq in batch])
        for seq, work in zip(batch, works, strict=True):
            if work and not is_decode:
                self.manager.commit(seq.seq_id, work)
            seq.num_computed += work
        self._counts["steps"] += 1
        self._emit(batch, logits, is_decode)

    def _end_changed(self, batch: list[Sequence]) -> bool:
        """End requests that were added under another identity than the forward's; whether its results are void."""
        requests = [seq.record.request for seq in batch]
        # what only an inspection sees is looked for once, when a request begins
        now = self._watch.look() if all(request.is_begun for request in requests) else self._watch.inspect()
        is_void = False
        for request in [request for request in self._requests.values() if request.identity is not now]:
            # hooks are no part of what was asked for, but nobody shall share what is computed under them
            changes = request.identity.changes(now, () if self._frozen else ("hooks",))
            if changes:
                for seq in list(request.live.values()):
                    self._finish(seq, "error", f"the model changed after the request was added: {changes}")
            elif now.keys is None and not request.is_private:
                request.is_private = True
                for seq in request.scheduled():
                    self.scheduler.make_private(seq)
            else:
                continue
            is_void = True
        if is_void:
            self.scheduler.reset([seq for request in self._requests.values() for seq in request.scheduled()])
        else:
            for request in requests:
                request.is_begun = True
        return is_void

    def _draft(self, seq: Sequence) -> None:
        try:
            seq.draft = seq.settings.draft(seq.tokens)
        except Exception as error:  # of this request alone
            self._finish(seq, "error", f"{type(error).__name__}: {error}")

    def _forward(self, batch: list[Sequence], works: list[int], is_decode: bool) -> torch.Tensor:
        """Logits of every sequence whose last token is computed, and of each token of a draft, in order."""
        self.runner.pool.apply_moves()
        start = time.monotonic()
        computed = [seq.num_computed for seq in batch]
        if is_decode:
            logits = self.runner.run([seq.tokens[seq.num_computed] for seq in batch], computed, None, None)
        else:
            ids: list[int] = []
            at: list[int] = []
            counts = []
            for seq, work in zip(batch, works, strict=True):
                stop = seq.num_computed + work
                ids += seq.tokens[seq.num_computed : stop] + seq.draft
                counts.append(work + len(seq.draft))
                if work and stop == len(seq.tokens):
                    at += range(len(ids) - 1 - len(seq.draft), len(ids))
            logits = self.runner.run(ids, computed, counts, at)
        self._seconds["forward"] += time.monotonic() - start
        return logits

    def _emit(self, batch: list[Sequence], logits: torch.Tensor, is_decode: bool) -> None:
        """Samples for each sequence whose tokens are all computed."""
        ready: list[Sequence] = []
        rows: list[int] = []
        drafted = []
        row = 0
        for index, seq in enumerate(batch):
            if not seq.work or seq.num_computed != len(seq.tokens):
                continue
            row = index if is_decode else row
            if seq.draft:
                drafted.append((seq, row))
            else:
                ready.append(seq)
                rows.append(row)
                for child in self._fork(seq):
                    ready.append(child)
                    rows.append(row)
            row += 1 + len(seq.draft)
        if ready:
            generators = [seq.record.generator for seq in ready]
            choices = sample(ready, generators, logits if rows == list(range(len(logits))) else logits[rows])
            for seq, choice in zip(ready, choices, strict=True):
                self._accept(seq, choice)
        for seq, row in drafted:
            self._verify(seq, logits[row : row + 1 + len(seq.draft)])

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """The other samples of a request whose prompt is computed now."""
        if not seq.num_forks:
            return []
        children = [other for other in seq.record.request.live.values() if other is not seq]
        for child in children:
            self.scheduler.fork(seq, child)
        seq.num_forks = 0
        return children

    def _verify(self, seq: Sequence, logits: torch.Tensor) -> None:
        """Samples token after token as long as the draft is confirmed: what plain decoding would have sampled."""
        draft, seq.draft = seq.draft, []
        self._counts["draft"] += len(draft)
        for position, expected in enumerate([*draft, None]):
            choice = sample([seq], [seq.record.generator], logits[position : position + 1])[0]
            self._accept(seq, choice)
            if seq.finish_reason is not None or choice.token != expected:
                return
            self._counts["accepted"] += 1
            self.manager.append(seq.seq_id, [choice.token])
            seq.is_pending = False
            self.manager.commit(seq.seq_id, 1)
            seq.num_computed += 1

    def _accept(self, seq: Sequence, choice: Choice) -> None:
        """Takes a sampled token into its sequence; ends the sequence where it is due."""
        if seq.finish_reason is not None:
            return  # aborted by a callback of this step
        if choice.error is not None:
            # what the model computed from NaN may lie in published blocks
            for blocks in self.manager.block_ids(seq.seq_id):
                self.manager.pool.evict([block for block in blocks if block])
            self._finish(seq, "error", choice.error)
            return
        record: Record = seq.record
        seq.tokens.append(choice.token)
        seq.is_pending = True
        if record.first_token is None:
            record.first_token = time.monotonic()
        if choice.logprobs is not None:
            record.logprobs.append(choice.logprobs)
        self._counts["generated"] += 1
        try:
            text = "" if record.decoder is None else record.decoder(choice.token)
            token = NewToken(record.request.id, record.sample, choice.token, text)
            self._output.tokens.append(token)
            if record.request.events is not None:
                record.request.events.append(token)
            if record.request.streamer is not None:
                record.request.streamer.put(torch.tensor([choice.token]))
            reason = seq.settings.stop_reason(seq.tokens)
        except Exception as error:  # whatever a user's streamer or criterion raises
            self._finish(seq, "error", f"{type(error).__name__}: {error}")
            return
        if reason is not None and seq.finish_reason is None:
            self._finish(seq, reason)

    def _finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        record: Record = seq.record
        request = record.request
        seq.finish_reason = reason
        ids = seq.tokens[len(request.prompt_ids) :]
        now = time.monotonic()
        result = Result(
            request_id=request.id,
            sample=record.sample,
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            text=None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason=reason,
            error=error,
            logprobs=None if seq.settings.logprobs is None else record.logprobs,
            num_cached_tokens=max(0, seq.num_cached),
            num_preemptions=seq.num_preemptions,
            seconds_to_first_token=None if record.first_token is None else record.first_token - request.arrival,
            seconds=now - request.arrival,
        )
        request.results[record.sample] = result
        self._output.finished.append(result)
        self._counts["cached"] += result.num_cached_tokens
        del request.live[record.sample]
        self.scheduler.remove(seq)
        if not request.live:
            self._requests.pop(request.id, None)
            if request.streamer is not None:
                _end_stream(request.streamer, result)

    # Accounts.

    def stats(self) -> EngineStats:
        with self._lock:
            counts = self._counts
            return EngineStats(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_steps=counts["steps"],
                num_prompt_tokens=counts["prompt"],
                num_cached_tokens=counts["cached"],
                num_generated_tokens=counts["generated"],
                num_preemptions=self.manager.num_preemptions,
                num_draft_tokens=counts["draft"],
                num_accepted_tokens=counts["accepted"],
                acceptance_rate=counts["accepted"] / counts["draft"] if counts["draft"] else 0.0,
                step_seconds=self._seconds["step"],
                forward_seconds=self._seconds["forward"],
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
            for request_id in list(self._requests):
                self.abort(request_id)
            self._closed = True


def _begin_stream(streamer: Any, ids: list[int]) -> None:
    try:
        streamer.put(torch.tensor([ids]))
    except Exception as error:
        raise InvalidArgumentError(
            f"streamer: expected one that takes the prompt, its put() raised {type(error).__name__}: {error}"
        ) from error


def _end_stream(streamer: Any, result: Result) -> None:
    try:
        streamer.end()
    except Exception as error:  # whatever a user's streamer raises
        text = f"streamer.end(): {type(error).__name__}: {error}"
        result.error = text if result.error is None else f"{result.error}; {text}"


def _check_mode(model: Any) -> None:
    if model.training:
        raise InvalidArgumentError("model: expected one in evaluation mode, call model.eval()")
