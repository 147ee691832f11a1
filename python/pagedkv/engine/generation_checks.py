"""Generation settings that an engine refuses by name before anything changes, in tables."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import BaseWatermarkingConfig

from ..errors import integer, refused


class _Number(NamedTuple):
    kind: type
    expected: str
    holds: Callable[[Any], bool]


_ABOVE_0 = _Number(float, "a number above 0", lambda value: 0 < value < math.inf)
_FROM_0 = _Number(float, "a number of at least 0", lambda value: value >= 0)
_FROM_0_TO_1 = _Number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
_ABOVE_0_TO_1 = _Number(float, "a number above 0, at most 1", lambda value: 0 < value <= 1)
_COUNT = _Number(int, "an int of at least 0", lambda value: value >= 0 and value % 1 == 0)

_NUMBERS = {"max_time": _FROM_0, "repetition_penalty": _ABOVE_0, "encoder_repetition_penalty": _ABOVE_0}
# of use in sampling alone: checkpoints and callers also leave values here that greedy generation never reads
_SAMPLING_NUMBERS = {
    "temperature": _ABOVE_0,
    "top_k": _COUNT,
    "top_p": _FROM_0_TO_1,
    "min_p": _FROM_0_TO_1,
    "top_h": _ABOVE_0_TO_1,
    "typical_p": _ABOVE_0_TO_1,
    "epsilon_cutoff": _FROM_0_TO_1,
    "eta_cutoff": _FROM_0_TO_1,
}
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
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "do_sample": ("a bool", lambda value: isinstance(value, bool)),
    "renormalize_logits": ("a bool", lambda value: isinstance(value, bool)),
    "remove_invalid_values": ("a bool", lambda value: isinstance(value, bool)),
    "early_stopping": ("a bool or 'never'", lambda value: isinstance(value, bool) or _is_same(value, "never")),
    "token_healing": ("False", lambda value: value is False),
    "guidance_scale": ("None or 1", lambda value: _is_number(value) and value == 1),
    "bad_words_ids": (
        "a list of lists of token ids",
        lambda value: isinstance(value, list) and _are_words(value, list),
    ),
    "sequence_bias": ("{(ids): float} or [[[ids], float]]", lambda value: _are_biases(value)),
    "stop_strings": (
        "a string or a list of them",
        lambda value: all(isinstance(text, str) for text in (value if isinstance(value, set) else _listed(value))),
    ),
    "watermarking_config": (
        "a WatermarkingConfig whose bias is a number and whose sizes and keys are ints",
        lambda value: isinstance(value, BaseWatermarkingConfig | dict) and _is_watermark(value),
    ),
    "exponential_decay_length_penalty": (
        "(start, factor)",
        lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)),
    ),
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


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuses values of the wrong type, and out of the range in which they are of use.

    Args:
        settings: by their names in GenerationConfig, complete or some of them.

    Raises:
        InvalidArgumentError: names the setting.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, least in _INTEGERS.items():
        if name in given:
            integer(name, given[name], least, maximum=_LARGEST)
    for name, (expected, holds) in _FORMS.items():
        if name in given and not holds(given[name]):
            raise refused(name, expected, given[name])
    for name, expected in _TOKEN_IDS.items():
        if name in given and not _are_token_ids(given[name], expected):
            raise refused(name, expected, given[name])
    for name, number in (_NUMBERS | _SAMPLING_NUMBERS).items():
        is_read = name in _NUMBERS or bool(given.get("do_sample"))
        if name in given and not (_is_number(given[name]) and (number.holds(given[name]) or not is_read)):
            raise refused(name, number.expected, given[name])


def _is_same(value: Any, known: Any) -> bool:
    """Equal and of one type: tensors and arrays, which no known value is, have no single answer to ==."""
    return type(value) is type(known) and bool(value == known)


def _is_number(value: Any) -> bool:
    """A real number that a float can hold."""
    if type(value) is bool or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


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


def _is_watermark(value: Any) -> bool:
    """What transformers itself looks at too late: when a processor is made, or when it first runs."""
    settings = value if isinstance(value, dict) else vars(value)
    integers = ("hashing_key", "context_width", "ngram_len", "context_history_size", "sampling_table_seed")
    are_ids = all(_is_id(settings[name]) for name in integers if name in settings)
    return are_ids and ("bias" not in settings or _is_number(settings["bias"]))


def _are_words(words: Collection[Any], kind: type[list[Any] | tuple[Any, ...]]) -> bool:
    return bool(words) and all(isinstance(word, kind) and word and all(map(_is_id, word)) for word in words)


def _are_biases(value: Any) -> bool:
    if isinstance(value, dict):
        return _are_words(value, tuple) and all(isinstance(bias, float) for bias in value.values())
    if not isinstance(value, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return False
    return _are_words([pair[0] for pair in value], list) and all(isinstance(pair[1], float) for pair in value)


def convert_numbers(config: GenerationConfig) -> None:
    """Gives numbers the types that transformers' warpers insist on: a temperature of 2 is 2.0 from here on."""
    for name, number in (_NUMBERS | _SAMPLING_NUMBERS).items():
        value = getattr(config, name, None)
        if value is not None and number.holds(value):
            setattr(config, name, number.kind(value))


def check_vocabulary(config: GenerationConfig, vocabulary: int) -> None:
    """Refuses ids to force or to bias that the model has no logits of; they would fail in the middle of a request.

    Raises:
        InvalidArgumentError: names the setting and an id.
    """
    for name in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "sequence_bias"):
        value = getattr(config, name)
        if name == "sequence_bias" and isinstance(value, list | tuple):  # [[ids, bias], ...], or {ids: bias}
            value = [entry[:1] for entry in value if isinstance(entry, list | tuple)]
        for token in _flat(value):
            if isinstance(token, numbers.Integral) and not 0 <= int(token) < vocabulary:
                raise refused(name, f"token ids in 0..{vocabulary - 1}", token)


def _flat(ids: Any) -> list[Any]:
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return [token for part in ids for token in _flat(part)] if isinstance(ids, list | tuple | set | dict) else [ids]


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
