"""What an engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..manager import KVCacheStats


class NewToken(NamedTuple):
    """One sampled token. text: what it adds, for `stream`; may be empty while a character is incomplete."""

    request_id: int
    sample: int
    token_id: int
    text: str = ""


@dataclass(slots=True)
class Result:
    """One finished sample of a request.

    Attributes:
        token_ids: what was sampled, an end-of-sequence token included; text: its decoded form, without special tokens.
        finish_reason: "eos", "length", "stop_string", "stopping_criteria", "time", "abort" or "error".
        error: what went wrong; with another finish reason than "error": the engine was closed ("abort"), or the
            streamer's ``end`` has failed after all tokens.
        logprobs: per token, {token id: log-probability} of itself and the likeliest ones, if they were asked for.
        num_cached_tokens: of the prompt, served from the prefix cache.
        seconds_to_first_token, seconds: since the request was added.
    """

    request_id: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None
    logprobs: list[dict[int, float]] | None
    num_cached_tokens: int
    num_preemptions: int
    seconds_to_first_token: float | None
    seconds: float


@dataclass(slots=True)
class StepOutput:
    """What a step brought, over all requests."""

    tokens: list[NewToken] = field(default_factory=list)
    finished: list[Result] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made; `kv` and the first two are of now. Seconds are of the host's clock."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    step_seconds: float
    forward_seconds: float
    kv: KVCacheStats
