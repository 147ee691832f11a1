"""Tokens and text for a consumer of one request, read from what its samples hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .requests import Request, Sample
from .results import NewToken
from .sampling import describe

_OVERLAP = 16  # tokens before a piece that are decoded again with it: what joins them can depend on a few
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # of tokenizers that fall back to bytes
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character yet


class TextPieces:
    """Cuts the text of growing tokens into pieces; joined they are what `decode` gives for all tokens.

    A piece ends before an incomplete character, before a space that cleaning up could still take back, and before a run
    of byte tokens, which become unknown characters all together if they are none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[list[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
        self._is_cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._name: Callable[[int], Any] = getattr(tokenizer, "convert_ids_to_tokens", lambda token: None)
        self._ids: list[int] = []
        self._start = 0  # first token that is decoded still
        self._num_given = 0  # characters of the text from there

    def add(self, token: int, is_last: bool) -> str:
        """The text that a token completes; with the last one, all that is left."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        is_byte = _BYTE.fullmatch(str(self._name(token))) is not None
        stable = self._num_given if is_byte else self._stable_end(text)
        end = len(text) if is_last else max(self._num_given, stable)
        piece, self._num_given = text[self._num_given : end], end
        if end == len(text) and not is_byte and len(self._ids) - self._start > 2 * _OVERLAP:
            tail = self._decode(self._ids[-_OVERLAP:])
            if text.endswith(tail):
                self._start, self._num_given = len(self._ids) - _OVERLAP, len(tail)
        return piece

    def _stable_end(self, text: str) -> int:
        """How much of a text stays when tokens are added."""
        end = len(text.rstrip(_UNKNOWN))
        space = text.find(" ", max(0, end - 3), end) if self._is_cleaned else -1  # " n't" and shorter ones are joined
        return end if space < 0 else space


class Reader:
    """Gives each token of a request once, with its text where there is a tokenizer."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._request = request
        self._next = [len(request.prompt_ids)] * len(request.samples)
        self._pieces = [None if tokenizer is None else TextPieces(tokenizer) for _ in request.samples]

    @property
    def has_news(self) -> bool:
        return any(sample.told[0] > at for sample, at in zip(self._request.samples, self._next, strict=True))

    def read(self) -> Iterator[NewToken]:
        """What has come since the last call.

        Raises:
            RuntimeError: the tokenizer has failed.
        """
        for sample in self._request.samples:
            yield from self._read(sample)

    def _read(self, sample: Sample) -> Iterator[NewToken]:
        stop, is_ended = sample.told
        for at in range(self._next[sample.index], stop):
            token, pieces = sample.tokens[at], self._pieces[sample.index]
            self._next[sample.index] = at + 1
            try:
                text = "" if pieces is None else pieces.add(token, is_ended and at == stop - 1)
            except Exception as error:  # whatever a user's tokenizer raises
                raise RuntimeError(f"request {self._request.id}: {describe(error)}") from error
            yield NewToken(self._request.id, sample.index, token, text)
