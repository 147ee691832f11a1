"""Engine: many generation requests over one model at once, with continuous batching over paged KV.

    with pagedkv.Engine(model, tokenizer) as engine:
        results = engine.generate(["The sea", "A longer prompt"], max_new_tokens=32)

A step admits what fits, computes one packed batch of decode tokens and prompt chunks, samples, and drops what is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig

from ..errors import InvalidArgumentError, boolean, integer
from .core import EngineCore
from .progress import generation_bar
from .requests import Prompt, PromptError, Request, check_prompts
from .results import NewToken, Result


class Engine(EngineCore):
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
        requests = self._add_all(prompts, configs, seed, options)
        try:
            self._run_all(requests, progress)
        finally:
            for request in requests:
                self.abort(request.id)
        return [request.results[index] for request in requests for index in sorted(request.results)]

    def _add_all(
        self, prompts: Seq[Prompt], configs: list[Any], seed: int | None, options: dict[str, Any]
    ) -> list[Request]:
        """Adds every prompt, or raises as if none had come; an error of one prompt alone says which."""
        requests: list[Request] = []
        with self._lock:
            self._identity = self.runner.patch.follow_model(self.model)
            try:
                for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
                    own_seed = None if seed is None else seed + 1000 * index
                    requests.append(self._requests[self.add_request(prompt, config, seed=own_seed, **options)])
            except BaseException as error:
                for request in requests:
                    self._withdraw(request)
                is_of_one = isinstance(error, PromptError) or any(config is not configs[0] for config in configs)
                if is_of_one and isinstance(error, InvalidArgumentError):
                    raise InvalidArgumentError(f"prompts[{index}]: {error}") from error
                raise
            finally:
                self._identity = None
        return requests

    def _run_all(self, requests: list[Request], progress: bool) -> None:
        total = sum(len(request.live) for request in requests)
        start, generated = time.monotonic(), self._counts["generated"]
        with generation_bar(total, progress) as show:
            while any(request.live for request in requests):
                self.step()
                if progress:
                    speed = (self._counts["generated"] - generated) / (time.monotonic() - start)
                    used = 1 - self.manager.num_free_blocks / self.manager.pool.num_usable
                    running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
                    figures = f"{speed:.0f} tokens/s, {running} running, {waiting} waiting, KV {used:.0%}"
                    show(sum(len(request.results) for request in requests), figures)

    def stream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Iterator[NewToken]:
        """Yields the tokens of one request as they are sampled, with their text. Closing the iterator aborts it.

        Raises:
            InvalidArgumentError: the request is refused. RuntimeError: it has failed.
        """
        request = self._follow(prompt, generation_config, options)
        try:
            while request.live or request.events:
                if not request.events:
                    self.step()
                while request.events:
                    yield request.events.popleft()
            _raise_error(request)
        finally:
            self.abort(request.id)

    async def astream(
        self, prompt: Prompt, generation_config: GenerationConfig | None = None, **options: Any
    ) -> AsyncIterator[NewToken]:
        """`stream` for asyncio: steps run in a thread, for all consumers that wait."""
        request = await asyncio.to_thread(self._follow, prompt, generation_config, options)
        try:
            while request.live or request.events:
                if not request.events:
                    await asyncio.to_thread(self._step_for, request)
                while request.events:
                    yield request.events.popleft()
            _raise_error(request)
        finally:
            self.abort(request.id)

    def _step_for(self, request: Request) -> None:
        """A step, unless another consumer's step has brought something meanwhile."""
        with self._lock:
            if request.live and not request.events:
                self.step()

    def _follow(self, prompt: Prompt, config: GenerationConfig | None, options: dict[str, Any]) -> Request:
        """Adds a request whose tokens are kept for a consumer."""
        with self._lock:
            request = self._requests[self.add_request(prompt, config, **options)]
            request.events = deque()
            for seq in request.live.values():
                seq.record.decoder = self._text_decoder()
            return request

    def _text_decoder(self) -> Any:
        """A function from a token to the text that it completes."""
        if self.tokenizer is None or not self.tokenizer.is_fast:
            return None
        stream, backend = DecodeStream(skip_special_tokens=True), self.tokenizer.backend_tokenizer
        return lambda token: stream.step(backend, token) or ""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _raise_error(request: Request) -> None:
    for result in request.results.values():
        if result.error is not None:
            raise RuntimeError(f"request {request.id}: {result.error}")
