"""What one request asks of its samples, with transformers' own generation settings and stopping criteria."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import GenerationMode
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ..errors import InvalidArgumentError
from ..transfers import to_device
from .generation_checks import check_callables, check_forced, check_generation, check_served, convert_numbers

# warpers that look at each row of scores alone: rows of several requests go through them together
_ROW_WISE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
)
_HOST = torch.device("cpu")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


class Settings:
    """What one request asks of its samples; built from a GenerationConfig as ``generate`` builds it.

    Args:
        prompt: its token ids.
        processors, criteria: applied beside those of the config, as in ``generate``.
        logprobs: so many of the likeliest tokens' log-probabilities are kept with each token; None: none.

    Attributes:
        max_length: tokens after which a sample ends, the prompt included. num_samples: from `num_return_sequences`.
        is_watched: a sample may also end by a criterion or by time.

    Raises:
        InvalidArgumentError: a way of generation that is not greedy, sampling or prompt lookup; or an option that needs
            more than one sequence's logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: GenerationConfig | None,
        prompt: list[int],
        processors: Seq[Any] | None = None,
        criteria: Seq[Any] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, GenerationConfig | None):
            raise InvalidArgumentError(
                f"generation_config: expected a GenerationConfig or None, got {type(config).__name__}"
            )
        processors = check_callables("logits_processor", processors)
        criteria = check_callables("stopping_criteria", criteria)
        check_served(config, options, model.generation_config)
        self.device = model.get_input_embeddings().weight.device
        self.logprobs = logprobs

        def make(options: Mapping[str, Any]) -> None:
            merged = _merge(model, config, options, len(prompt), self.device)
            _check(merged, tokenizer)
            self._build(model, tokenizer, merged, prompt, processors, criteria)

        try:
            make(options)
        except _Refused as refusal:
            text = str(refusal)
            rest = {name: {other: options[other] for other in options if other != name} for name in options}
            names = [name for name in options if not _is_refused(make, rest[name])]  # without it the others are taken
            name = max(names, key=lambda name: (name in text, name != "do_sample"), default=None)
            expected, got = ("a value", repr(options[name])) if name else ("settings", "some that it refuses")
            raise InvalidArgumentError(
                f"{name or 'generation_config'}: expected {expected} that generate takes, got {got}: {text}"
            ) from refusal.__cause__

    def _build(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: GenerationConfig,
        prompt: list[int],
        processors: Seq[Any],
        criteria: Seq[Any],
    ) -> None:
        self.max_length: int = config.max_length
        self.num_samples: int = config.num_return_sequences or 1
        self.do_sample: bool = bool(config.do_sample)
        reads_prompt = config.encoder_repetition_penalty or config.encoder_no_repeat_ngram_size
        with _checks_of_transformers():
            self.processors = model._get_logits_processor(
                config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=as_ids(prompt, self.device) if reads_prompt else None,
                logits_processor=LogitsProcessorList(processors),
                device=self.device,
            )
            self.deadline = None if config.max_time is None else time.monotonic() + config.max_time
        self.is_plain = not self.processors and not self.do_sample
        self.key = self._key()
        if self.key is None:
            self._try_processors(processors, prompt, model.config.get_text_config(decoder=True).vocab_size)
        eos = config._eos_token_tensor
        self.eos = frozenset() if eos is None else frozenset(eos.tolist())
        self.criteria = StoppingCriteriaList(criteria)
        if config.stop_strings:
            with _checks_of_transformers():
                self.criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        self.is_watched = bool(self.criteria) or self.deadline is not None
        self.lookup: PromptLookupCandidateGenerator | None = None
        if config.prompt_lookup_num_tokens:
            self.lookup = PromptLookupCandidateGenerator(
                eos_token_id=eos,
                num_output_tokens=config.prompt_lookup_num_tokens,
                max_matching_ngram_size=config.max_matching_ngram_size or 2,
                max_length=config.max_length,
            )

    def _try_processors(self, given: Seq[Any], prompt: list[int], vocabulary: int) -> None:
        """Call copies of what transformers made once: some settings it looks at no sooner than there.

        Those of the caller's own are not: they may count their calls.
        """
        ids, scores = as_ids(prompt, self.device), torch.zeros((1, vocabulary), device=self.device)
        for processor in self.processors:
            if all(processor is not other for other in given):
                with _checks_of_transformers(f"{type(processor).__name__}: "):
                    copy.deepcopy(processor)(ids, scores)

    def _key(self) -> tuple[Any, ...] | None:
        """Requests with equal keys share their processors' calls; None: every row by itself, with its own ids."""
        if all(type(processor) in _ROW_WISE for processor in self.processors):
            parts = [(type(processor), *sorted(vars(processor).items())) for processor in self.processors]
            return (self.do_sample, *parts)
        return None

    def stop_reason(self, tokens: list[int], new: list[int]) -> str | None:
        """Why a sample of these tokens ends with the last of its new ones; None: it goes on."""
        if new[-1] in self.eos:
            return "eos"
        for criterion in self.criteria:
            is_text = isinstance(criterion, StopStringCriteria)  # of ours, for which the host's ids will do
            if bool(criterion(as_ids(tokens + new, _HOST if is_text else self.device), None).all()):
                return "stop_string" if is_text else "stopping_criteria"
        if len(tokens) + len(new) >= self.max_length:
            return "length"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return "time"
        return None

    def draft(self, tokens: list[int]) -> list[int]:
        """Tokens that may follow, found in the sequence itself."""
        room = self.max_length - len(tokens) - 1
        if self.lookup is None or room < 1:
            return []
        found: Tensor = self.lookup.get_candidates(as_ids(tokens, _HOST))[0]
        return found[0, len(tokens) : len(tokens) + room].tolist()


class _Refused(Exception):
    """What transformers refuses is the caller's, whatever it raises for that."""


@contextmanager
def _checks_of_transformers(place: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Refused(f"{place}{error}") from error


def _is_refused(make: Callable[[Mapping[str, Any]], None], options: Mapping[str, Any]) -> bool:
    try:
        make(options)
    except (_Refused, InvalidArgumentError):
        return True
    return False


def _merge(
    model: PreTrainedModel,
    config: GenerationConfig | None,
    options: Mapping[str, Any],
    num_prompt: int,
    device: torch.device,
) -> GenerationConfig:
    """A config of its own for one request, with lengths and special tokens as `generate` prepares them."""
    given = {} if config is None else {name: value for name, value in vars(config).items() if value is not None}
    # before generate compares with numbers
    check_generation({**vars(model.generation_config), **given, **options})
    given_length = options.get("max_length") or (config and config.max_length)
    given_min = options.get("min_length") or (config and config.min_length)
    with _checks_of_transformers():
        config, unknown = model._prepare_generation_config(config, **options)
    if unknown:
        names = sorted(unknown)
        hint = "; num_return_sequences is the number of samples" if "n" in unknown else ""
        raise InvalidArgumentError(f"{', '.join(names)}: not an option of GenerationConfig or of add_request{hint}")
    check_forced(config, model.get_input_embeddings().num_embeddings)
    convert_numbers(config)
    if config.encoder_no_repeat_ngram_size:  # transformers makes as many lists, and a prompt has no longer n-gram
        config.encoder_no_repeat_ngram_size = min(config.encoder_no_repeat_ngram_size, num_prompt + 1)
    with _checks_of_transformers():
        model._prepare_special_tokens(config, device=device)
        return model._prepare_generated_length(config, not given_length, not given_min, "input_ids", num_prompt, None)


def _check(config: GenerationConfig, tokenizer: Any) -> None:
    with _checks_of_transformers():
        mode = config.get_generation_mode()
    if mode not in _MODES or (mode == GenerationMode.ASSISTED_GENERATION and not config.prompt_lookup_num_tokens):
        raise InvalidArgumentError(f"generation_config: expected greedy, sampling or prompt lookup, got {mode.value}")
    if config.stop_strings and tokenizer is None:
        raise InvalidArgumentError("stop_strings: expected an Engine with a tokenizer, got one without")
    if config.exponential_decay_length_penalty is not None and config._eos_token_tensor is None:
        raise InvalidArgumentError("exponential_decay_length_penalty: expected an eos_token_id beside it, got None")


def as_ids(tokens: list[int], device: torch.device) -> Tensor:
    """[1, T] for transformers."""
    return to_device([tokens], device)
