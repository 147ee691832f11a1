"""Requests of an engine: what is kept of each, and what is refused at once."""

from __future__ import annotations

import numbers
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError, integer
from ..hf.identity import Identity
from .results import NewToken, Result
from .sampling import Settings
from .scheduler import Scheduler, Sequence

if TYPE_CHECKING:
    from .runner import Runner

_SEEDS = 2**63

Prompt = str | Seq[int] | torch.Tensor


class PromptError(InvalidArgumentError):
    """What is wrong is the prompt or its length, not what is asked for beside it."""


@dataclass(eq=False, slots=True)
class Request:
    id: int
    prompt_ids: list[int]
    streamer: Any
    arrival: float
    identity: Identity
    is_private: bool
    is_begun: bool = False
    events: deque[NewToken] | None = None
    live: dict[int, Sequence] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)

    def scheduled(self) -> list[Sequence]:
        """Unfinished samples; the first stands for all until its prompt is computed."""
        first = self.live.get(0)
        return [first] if first is not None and first.num_forks else list(self.live.values())


@dataclass(eq=False, slots=True)
class Record:
    """What the engine keeps of a sequence beside its schedule."""

    request: Request
    sample: int
    generator: torch.Generator
    logprobs: list[dict[int, float]]
    decoder: Any = None
    first_token: float | None = None


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


def check_logprobs(logprobs: Any, vocabulary: int) -> int:
    count = integer("logprobs", logprobs)
    if not 0 <= count <= vocabulary:
        raise InvalidArgumentError(f"logprobs: expected 0..{vocabulary}, got {count}")
    return count


def check_priority(priority: Any) -> None:
    if not isinstance(priority, numbers.Real) or priority != priority:  # NaN has no place in an order
        raise InvalidArgumentError(f"priority: expected a number, got {priority!r}")


def check_seed(seed: Any, num_samples: int) -> int:
    first = integer("seed", seed, 0)
    if first + num_samples > _SEEDS:
        raise InvalidArgumentError(
            f"seed: expected seed + i below 2**63 for each of {num_samples} samples, got {first}"
        )
    return first


def check_fit(runner: Runner, scheduler: Scheduler, num_prompt: int, settings: Settings) -> None:
    """Refuse what can never run.

    Raises:
        InvalidArgumentError: with the numbers; a PromptError where a shorter prompt would run.
    """
    length, pool, num_usable = settings.max_length, runner.pool, runner.pool.manager.pool.num_usable
    asked = f"prompt of {num_prompt} tokens, up to {length} with what is generated"
    if length <= num_prompt:
        raise PromptError(f"max_length: expected more than the prompt's {num_prompt} tokens, got {length}")
    if length > runner.max_length:
        raise PromptError(
            f"{asked}: expected at most {runner.max_length} (positions of the model, or {num_usable} blocks of "
            f"{pool.block_size})"
        )
    needed = _blocks_needed(runner, scheduler, length - 1)  # the last token's keys are never written
    if needed > num_usable:
        raise PromptError(f"{asked}: needs {needed} blocks of {pool.block_size} tokens, and the pool has {num_usable}")
    most = scheduler.max_num_seqs
    if settings.num_samples > most:
        raise InvalidArgumentError(
            f"num_return_sequences: expected at most max_num_seqs ({most}), got {settings.num_samples}"
        )


def _blocks_needed(runner: Runner, scheduler: Scheduler, length: int) -> int:
    size, chunk = runner.pool.block_size, scheduler.max_num_batched_tokens
    needed = 0
    for window in runner.pool.windows:
        blocks = -(-length // size)
        needed += blocks if window is None else min(blocks, -(-(window - 1 + chunk) // size) + 1)
    return needed
