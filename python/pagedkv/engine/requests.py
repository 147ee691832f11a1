"""Requests of an engine, and the samples that run for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..hf.identity import Identity
from .results import Result
from .settings import Settings


@dataclass(eq=False, slots=True)
class Request:
    """What was asked for, and what came of it.

    Attributes:
        is_followed: `generate` or a stream reads what comes of it; otherwise `step` gives it out.
        identity: of the model when it was added. is_private: it shares no blocks with others.
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
        is_simple: each token is the likeliest, and no more is kept of it. has_drafts: some of its steps verify a draft.
        told: how many tokens a consumer may read, and whether no more will come; set in one go.
    """

    seq_id: int
    request: Request
    index: int
    rank: tuple[Any, int]
    tokens: list[int]
    generator: torch.Generator
    told: tuple[int, bool] = field(init=False)
    num_put: int = field(init=False)
    settings: Settings = field(init=False)
    is_simple: bool = field(init=False)
    has_drafts: bool = field(init=False)
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
        self.settings = self.request.settings
        self.is_simple = self.settings.is_plain and self.settings.logprobs is None
        self.has_drafts = self.settings.lookup is not None
        self.num_put = len(self.tokens)
        self.told = len(self.tokens), False

    def rewind(self) -> None:
        """Set the random stream to where it stands behind `tokens`."""
        if self.random_state is None:
            self.generator.manual_seed(self.generator.initial_seed())
        else:
            self.generator.set_state(self.random_state)

    @property
    def priority(self) -> Any:
        return -self.rank[0]

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return self.tokens[len(self.request.prompt_ids) :]
