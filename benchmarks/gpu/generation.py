"""``generate``: a model of 1.1 billion random weights by itself, patched, and under ``Engine``.

The floor of a step is reading the weights once; keys and values are few beside them here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from . import models
from .device import DTYPE, REHEARSAL
from .report import Record, Step

_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_PROMPTS = (4, 9) if REHEARSAL else tuple(16 + 8 * i for i in range(16))
_NEW = 4 if REHEARSAL else 64
_NEAR_TIE = 0.15  # between two logits of a random model, whose spread is 0.9: about 10 roundings of bfloat16
_OWN = "generate: the model itself"


class Generation:
    """The model and its own tokens; the ways are measured one after the other."""

    def __init__(self) -> None:
        self.model: Any = None
        self.ids: list[list[int]] = []
        self.own: list[list[int]] = []
        self.scores: list[torch.Tensor] = []  # [B, vocabulary] of each step

    def _prepare(self) -> None:
        if self.model is None:
            self.model = models.make(DTYPE, **_SIZES)
            self.ids = models.prompts(self.model.config.vocab_size, _PROMPTS)
            scores = {"output_scores": True, "return_dict_in_generate": True}
            output = models.generate(self.model, self.ids, _NEW, **scores)
            self.own = output.sequences[:, max(map(len, self.ids)) :].tolist()
            self.scores = [score.float().cpu() for score in output.scores]

    def _timed(self, call: Callable[[], list[list[int]]], limits: Record) -> Record:
        """The first call compiles and captures; the second is timed."""
        agreement = self.assert_same(call())
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        floor = _NEW * weights / limits["read_gb_per_s"] / 1e9
        return {
            "milliseconds": took * 1e3,
            "tokens_per_s": len(self.ids) * _NEW / took,
            "floor_milliseconds": floor * 1e3,
            "floor": f"{_NEW} reads of the weights ({weights / 1e9:.2f} GB)",
            "ratio": floor / took,
            "same_tokens": agreement,
        }

    def assert_same(self, tokens: list[list[int]]) -> float:
        """The share of tokens before the first other one, which must be a near-tie in the model's own logits."""
        same = 0
        for row, (got, own) in enumerate(zip(tokens, self.own, strict=True)):
            at = next((i for i, pair in enumerate(zip(got, own, strict=True)) if pair[0] != pair[1]), None)
            same += _NEW if at is None else at
            if at is not None:
                score = self.scores[at][row]
                gap = float(score.max() - score[got[at]])
                assert gap <= _NEAR_TIE, f"prompt {row}, token {at}: {got[at]} is {gap:.2f} below the best, {own[at]}"
        return same / (len(tokens) * _NEW)

    def measure(self, way: str, limits: Record) -> Record:
        import pagedkv

        self._prepare()
        if way == "own":
            return self._timed(lambda: models.tokens_of(self.model, self.ids, _NEW), limits)
        if way.startswith("patch"):
            with pagedkv.patched(self.model, num_blocks=1024, compile=way == "patch, compiled"):
                return self._timed(lambda: models.tokens_of(self.model, self.ids, _NEW), limits)
        settings: dict[str, Any] = {"num_blocks": 1024, "max_num_seqs": len(self.ids), "max_num_batched_tokens": 1024}
        settings |= {"prefix_caching": False, "compile": way == "engine, compiled"}
        with pagedkv.Engine(self.model, buckets=[len(self.ids)], **settings) as engine:
            return self._timed(lambda: models.run_engine(engine, self.ids, _NEW), limits)


def steps(limits: Callable[[], Record], requires: tuple[str, ...]) -> list[Step]:
    generation = Generation()
    ways = {"own": 15, "patch": 15, "engine": 20, "engine, compiled": 45, "patch, compiled": 45}  # seconds
    if REHEARSAL:  # Inductor's CPU code would say nothing
        ways = {way: seconds for way, seconds in ways.items() if "compiled" not in way}

    def step(way: str, seconds: float) -> Step:
        name = _OWN if way == "own" else f"generate: {way}"
        needs = requires if way == "own" else (*requires, _OWN)
        return Step(name, seconds, lambda: generation.measure(way, limits()), needs)

    return [step(*item) for item in ways.items()]
