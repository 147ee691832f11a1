"""Generation settings that an engine does not serve, and those that transformers itself would refuse too late."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import boolean, integer, refused

# numbers of any type: transformers' own processors insist on theirs, and look at the range
_NUMBERS = {"top_k": int} | dict.fromkeys(
    (
        "max_time",
        "temperature",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
    ),
    float,
)
_LARGEST = 2**62  # of any int: sums with lengths stay in int64
# the least that each may be
_INTEGERS = {
    "max_new_tokens": 1,
    "max_length": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "prompt_lookup_num_tokens": 0,
    "max_matching_ngram_size": 1,
}
_ID, _IDS, _LIST = "a token id", "a token id or a list of them", "a list of token ids"
_TOKEN_IDS = {
    "bos_token_id": _IDS,
    "eos_token_id": _IDS,
    "pad_token_id": _ID,
    "forced_bos_token_id": _ID,
    "forced_eos_token_id": _IDS,
    "suppress_tokens": _LIST,
    "begin_suppress_tokens": _LIST,
}
# What `generate` does and an engine does not: the values that ask for nothing else, and what to do instead.
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((None, True), "keys and values are always kept in the engine's blocks"),
    "cache_implementation": ((None, "dynamic", "paged"), "keys and values are always kept in the engine's blocks"),
    "cache_config": ((None,), "Engine has arguments for its blocks"),
    "max_cache_len": ((None,), "num_blocks of Engine is the size of its cache"),
    "prefill_chunk_size": ((None,), "max_num_batched_tokens of Engine cuts prompts"),
    "continuous_batching_config": ((None,), "Engine has arguments for its batches"),
    "output_scores": ((None, False), "logprobs=n keeps the log-probabilities of n tokens"),
    "output_logits": ((None, False), "logprobs=n keeps the log-probabilities of n tokens"),
    "output_attentions": ((None, False), "paged attention keeps no weights"),
    "output_hidden_states": ((None, False), "a step keeps no hidden states"),
    "guidance_scale": ((None, 1, 1.0), "a step has no second forward"),
    "token_healing": ((None, False), "prompts are computed as they are"),
}


def check_served(config: GenerationConfig | None, options: Mapping[str, Any], own: GenerationConfig) -> None:
    """Refuses what a caller asks of `generate` that an engine would silently leave out.

    Args:
        config, options: given by the caller. own: of the model; what a checkpoint's file says is nobody's wish.

    Raises:
        InvalidArgumentError: names the setting.
    """
    given = {**({} if config is None else vars(config)), **options}
    for name, (accepted, instead) in _NOT_SERVED.items():
        value = given.get(name)
        if not any(_is_same(value, known) for known in (*accepted, getattr(own, name, None))):
            raise refused(name, " or ".join(map(repr, accepted)) + f" ({instead})", value)


def check_generation(settings: Mapping[str, Any]) -> None:
    """Refuses lengths, counts and token ids that transformers takes as they are; the rest its processors refuse.

    Args:
        settings: by their names in GenerationConfig, complete or some of them.

    Raises:
        InvalidArgumentError: names the setting.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, least in _INTEGERS.items():
        if name in given:
            integer(name, given[name], least, maximum=_LARGEST)
    for name, expected in _TOKEN_IDS.items():
        if name in given and not _are_token_ids(given[name], expected):
            raise refused(name, expected, given[name])
    for name in ("do_sample", "renormalize_logits", "remove_invalid_values"):
        boolean(name, given.get(name, False))
    for name in _NUMBERS:
        if name in given and not _is_number(given[name]):
            raise refused(name, "a number", given[name])
    bias = given.get("sequence_bias")
    pairs = bias.items() if isinstance(bias, Mapping) else bias if isinstance(bias, list | tuple) else ()
    if any(isinstance(pair, list | tuple) and pair and pair[-1] != pair[-1] for pair in pairs):
        raise refused("sequence_bias", "numbers", bias)
    decay = given.get("exponential_decay_length_penalty")
    if decay is not None and not (isinstance(decay, list | tuple) and len(decay) == 2 and all(map(_is_number, decay))):
        raise refused("exponential_decay_length_penalty", "(start, factor)", decay)


def convert_numbers(config: GenerationConfig) -> None:
    """Gives numbers the types that transformers' warpers insist on: a temperature of 2 is 2.0 from here on."""
    for name, kind in _NUMBERS.items():
        value = getattr(config, name, None)
        if value is not None and (kind is float or isinstance(value, numbers.Integral)):
            setattr(config, name, kind(value))


def _is_number(value: Any) -> bool:
    """A real number that a float can hold, and not NaN."""
    if type(value) is bool or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _is_same(value: Any, known: Any) -> bool:
    """Equal and of one type: tensors and arrays, which no known value is, have no single answer to ==."""
    return type(value) is type(known) and bool(value == known)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_id(value: Any) -> bool:
    """An int of 64 bits."""
    return type(value) is not bool and isinstance(value, numbers.Integral) and -(2**63) <= int(value) < 2**63


def _are_token_ids(value: Any, expected: str) -> bool:
    is_list = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return expected != (_ID if is_list else _LIST) and all(map(_is_id, _listed(value)))


def check_forced(config: GenerationConfig, vocabulary: int) -> None:
    """Refuses ids to force that the model has no logits of: they would fail at the end of a request.

    Raises:
        InvalidArgumentError: names the setting and an id.
    """
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in _listed(getattr(config, name)):
            if token is not None and not 0 <= int(token) < vocabulary:
                raise refused(name, f"token ids in 0..{vocabulary - 1}", token)


def check_callables(name: str, given: Any) -> Seq[Any]:
    """A list of logits processors or stopping criteria; None is an empty one.

    Raises:
        InvalidArgumentError: it is something else, or holds something else.
    """
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise refused(name, "a list of callables", given)
    return given
