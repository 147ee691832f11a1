"""Requests of an engine and the samples that run for them, and what is refused at once."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError, integer
from ..hf.identity import Identity
from .results import Result
from .settings import Settings

if TYPE_CHECKING:
    from .runner import Runner

_SEEDS = 2**63

Prompt = str | Seq[int] | torch.Tensor


class PromptError(InvalidArgumentError):
    """What is wrong is the prompt or its length, not what is asked for beside it."""


@dataclass(eq=False, slots=True)
class Request:
    """What was asked for, and what came of it.

    Attributes:
        is_followed: `generate` or a stream reads what comes of it; otherwise `step` gives it out.
        identity: of the model when it was added. is_private: it shares no blocks with others.
        is_begun: a forward has computed tokens of it.
        results: of the samples that have ended, by their index.
        is_left: its consumer is gone.
    """

    id: int
    prompt_ids: list[int]
    settings: Settings
    cache_salt: Any
    streamer: Any
    is_followed: bool
    arrival: float
    identity: Identity | None = None
    is_private: bool = False
    is_begun: bool = False
    samples: list[Sample] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    is_stream_ended: bool = False
    is_left: bool = False

    @property
    def is_done(self) -> bool:
        """Every sample has its result."""
        return len(self.results) == len(self.samples)

    def scheduled(self) -> list[Sample]:
        """Unfinished samples; the first stands for all until its prompt is computed."""
        live = [sample for sample in self.samples if sample.finish_reason is None]
        return live[:1] if live and live[0].num_forks else live


@dataclass(eq=False, slots=True)
class Sample:
    """One sequence of a request: what runs.

    Attributes:
        index: its number within the request.
        rank: place in the order of service; the first part is the negative priority.
        tokens: the prompt's and the sampled ids. num_computed: how many of them have their keys written.
        generator, random_state: its own random stream, and where that stands behind `tokens`; None: at its beginning.
        is_pending: the last token is not known to the manager yet.
        draft: tokens that may follow; the next forward verifies them.
        num_forks: further samples of the request, which begin when the prompt is computed.
        row: its row in the block tables while it runs, else -1.
        work: tokens that the next forward computes, the draft not included.
        num_put: tokens that the streamer has got, the prompt's included.
        told: how many tokens a consumer may read, and whether no more will come; set in one go.
    """

    seq_id: int
    request: Request
    index: int
    rank: tuple[Any, int]
    tokens: list[int]
    generator: torch.Generator
    told: tuple[int, bool]
    num_put: int = field(init=False)
    random_state: torch.Tensor | None = None
    num_forks: int = 0
    num_computed: int = 0
    is_pending: bool = False
    draft: list[int] = field(default_factory=list)
    row: int = -1
    work: int = 0
    num_cached: int = -1
    num_preemptions: int = 0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    first_token: float | None = None
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.num_put = len(self.tokens)

    def rewind(self) -> None:
        """Sets the random stream to where it stands behind `tokens`."""
        if self.random_state is None:
            self.generator.manual_seed(self.generator.initial_seed())
        else:
            self.generator.set_state(self.random_state)

    @property
    def settings(self) -> Settings:
        return self.request.settings

    @property
    def priority(self) -> Any:
        return -self.rank[0]

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return self.tokens[len(self.request.prompt_ids) :]


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


def check_fit(runner: Runner, max_num_seqs: int, chunk: int, num_prompt: int, settings: Settings) -> None:
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
    needed = _blocks_needed(runner, chunk, length - 1)  # the last token's keys are never written
    if needed > num_usable:
        raise PromptError(f"{asked}: needs {needed} blocks of {pool.block_size} tokens, and the pool has {num_usable}")
    if settings.num_samples > max_num_seqs:
        raise InvalidArgumentError(
            f"num_return_sequences: expected at most max_num_seqs ({max_num_seqs}), got {settings.num_samples}"
        )


def _blocks_needed(runner: Runner, chunk: int, length: int) -> int:
    size = runner.pool.block_size
    needed = 0
    for window in runner.pool.windows:
        blocks = -(-length // size)
        needed += blocks if window is None else min(blocks, -(-(window - 1 + chunk) // size) + 1)
    return needed
