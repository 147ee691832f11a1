"""What callers ask for, made into requests; what is wrong with it is refused before the engine knows of it."""

from __future__ import annotations

import itertools
import numbers
import operator
import time
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import InvalidArgumentError, integer, refused
from ..manager.hashing import encode
from .config import EngineConfig
from .requests import Request, Sample
from .runner import Runner
from .settings import Settings

_SEEDS = 2**63

Prompt = str | Seq[int] | torch.Tensor


class PromptError(InvalidArgumentError):
    """What is wrong is the prompt or its length, not what is asked for beside it."""


class Intake:
    """Makes requests for a model.

    Args:
        runner: of the model. config: of the engine. tokenizer: for prompts as text; None: there are none.
    """

    def __init__(self, runner: Runner, config: EngineConfig, tokenizer: Any) -> None:
        self._runner = runner
        self._config = config
        self._tokenizer = tokenizer
        self._vocabulary = runner.model.get_input_embeddings().num_embeddings
        self._new_id = itertools.count().__next__
        self._new_seq_id = itertools.count().__next__

    def prepare(
        self,
        prompt: Prompt,
        generation_config: GenerationConfig | None,
        is_followed: bool,
        /,
        *,
        priority: Any = 0,
        cache_salt: Any = None,
        seed: int | None = None,
        logprobs: int | None = None,
        logits_processor: Seq[Any] | None = None,
        stopping_criteria: Seq[Any] | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Request:
        """A request that no queue knows yet; arguments and errors are those of `Engine.add_request`."""
        ids = encode_prompt(prompt, self._tokenizer, self._vocabulary)
        if logprobs is not None:
            logprobs = integer("logprobs", logprobs, 0, maximum=self._vocabulary)
        model, tokenizer = self._runner.model, self._tokenizer
        processors = logits_processor, stopping_criteria
        settings = Settings(model, tokenizer, generation_config, ids, *processors, logprobs=logprobs, **options)
        self._check_fit(len(ids), settings)
        if not isinstance(priority, numbers.Real) or priority != priority:  # NaN has no place in an order
            raise refused("priority", "a number", priority)
        encode(cache_salt, "cache_salt")  # raises for what is no plain value
        if streamer is not None and settings.num_samples > 1:
            raise InvalidArgumentError(f"streamer: expected a request with one sample, got {settings.num_samples}")
        first_seed = _check_seed(seed, settings.num_samples)
        request = Request(self._new_id(), ids, settings, cache_salt, streamer, is_followed, time.monotonic())
        for index in range(settings.num_samples):
            generator = torch.Generator().manual_seed(first_seed + index)
            rank = -priority, request.id
            request.samples.append(Sample(self._new_seq_id(), request, index, rank, list(ids), generator))
        request.samples[0].num_forks = settings.num_samples - 1
        return request

    def prepare_all(
        self, prompts: Seq[Prompt], config: GenerationConfig | Seq[GenerationConfig] | None, seed: Any, options: Any
    ) -> list[Request]:
        """A request of each prompt, as `Engine.generate` says; an error of one prompt alone says which."""
        check_prompts(prompts)
        configs: list[Any] = list(config) if isinstance(config, list | tuple) else [config] * len(prompts)
        if len(configs) != len(prompts):
            raise InvalidArgumentError(f"generation_config: expected {len(prompts)} configs, got {len(configs)}")
        if options.get("streamer") is not None and len(prompts) > 1:
            raise InvalidArgumentError(f"streamer: expected one prompt, got {len(prompts)}")
        seed = None if seed is None else integer("seed", seed, 0)
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, configs, strict=True)):
            own_seed = None if seed is None else seed + 1000 * index
            try:
                requests.append(self.prepare(prompt, own, True, seed=own_seed, **options))
            except InvalidArgumentError as error:
                if isinstance(error, PromptError) or any(other is not configs[0] for other in configs):
                    raise InvalidArgumentError(f"prompts[{index}]: {error}") from error
                raise
        return requests

    def _check_fit(self, num_prompt: int, settings: Settings) -> None:
        """Refuse what can never run.

        Raises:
            InvalidArgumentError: with the numbers; a PromptError where a shorter prompt would run.
        """
        length, most, runner = settings.max_length, self._config.max_num_seqs, self._runner
        pool, num_usable = runner.pool, runner.pool.manager.pool.num_usable
        got = f"got {num_prompt} tokens, up to {length} with what is generated"
        if length <= num_prompt:
            raise PromptError(f"max_length: expected more than the prompt's {num_prompt} tokens, got {length}")
        if length > runner.max_length:
            raise PromptError(
                f"prompt: expected at most {runner.max_length} tokens with what is generated (positions of the model, "
                f"or {num_usable} blocks of {pool.block_size}), {got}"
            )
        needed = self._blocks_needed(length - 1)  # the last token's keys are never written
        if needed > num_usable:
            raise PromptError(
                f"prompt: expected one that fits the {num_usable} blocks of {pool.block_size} tokens, {got}, which "
                f"need {needed} blocks"
            )
        if settings.num_samples > most:
            raise InvalidArgumentError(
                f"num_return_sequences: expected at most max_num_seqs ({most}), got {settings.num_samples}"
            )

    def _blocks_needed(self, length: int) -> int:
        pool, chunk = self._runner.pool, self._config.max_num_batched_tokens
        size = pool.block_size
        needed = 0
        for window in pool.windows:
            blocks = -(-length // size)
            needed += blocks if window is None else min(blocks, -(-(window - 1 + chunk) // size) + 1)
        return needed


def _check_seed(seed: Any, num_samples: int) -> int:
    """Of the first sample: what is given, or drawn from torch's stream."""
    if seed is None:
        return int(torch.randint(2**62, ()))
    first = integer("seed", seed, 0)
    if first + num_samples > _SEEDS:
        raise refused("seed", f"seed + i below 2**63 for each of {num_samples} samples", first)
    return first


def encode_prompt(prompt: Prompt, tokenizer: Any, vocabulary: int) -> list[int]:
    """The ids of a prompt.

    Raises:
        PromptError: it has none, or one outside the vocabulary, or it is text and there is no tokenizer, or
            neither text nor ids.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("prompt: expected token ids, as the engine has no tokenizer, got a string")
        prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, torch.Tensor) and prompt.dim() != 1:
        raise PromptError(f"prompt: expected token ids [T], got a tensor of shape {tuple(prompt.shape)}")
    if isinstance(prompt, Mapping | Set | bytes) or not isinstance(prompt, Iterable):
        hint = "; pass the rows of its input_ids" if isinstance(prompt, Mapping) else ""
        raise PromptError(f"prompt: expected text or token ids, got {type(prompt).__name__}{hint}")
    given: list[Any] = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    try:
        ids = [] if bool in map(type, given) else [operator.index(token) for token in given]
    except TypeError:
        ids = []
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        raise PromptError(
            f"prompt: expected text, or at least one token id in 0..{vocabulary - 1}, got {given[:8]!r} "
            f"({len(given)} in all)"
        )
    return ids


def check_prompts(prompts: Any) -> None:
    """Refuse what is one prompt or a batch of another kind where a list of prompts is due.

    Raises:
        InvalidArgumentError: with what to pass instead.
    """
    if isinstance(prompts, Mapping):
        got = f"{type(prompts).__name__}; pass its input_ids"
    elif isinstance(prompts, str):
        got = "a string"
    elif isinstance(prompts, torch.Tensor) and prompts.dim() < 2:
        got = f"a tensor of shape {tuple(prompts.shape)}; pass [ids] with ids [T]"
    elif not isinstance(prompts, Seq | torch.Tensor):
        got = type(prompts).__name__
    elif any(isinstance(prompt, int) for prompt in prompts):
        got = "token ids; pass [ids]"
    else:
        return
    raise InvalidArgumentError(f"prompts: expected a list of prompts, got {got}")
