"""One forward: which tokens of which samples it computes, and whose logits it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .requests import Sample


@dataclass(slots=True)
class Batch:
    """The tokens of a forward, row after row.

    Attributes:
        token_ids: [T].
        num_computed: tokens whose keys are written, per row.
        num_new: tokens of this forward, per row; None: one each.
        logits_at: indices into token_ids; None, for one token each: all of them.
        ready: samples whose last token is among them, each with its first row of logits. A draft has a row for each of
            its tokens behind that one.
        is_decode: it computes the last token of each sample, and nothing else.
    """

    token_ids: list[int]
    num_computed: list[int]
    num_new: list[int] | None = None
    logits_at: Any = None
    ready: list[tuple[Sample, int]] = field(default_factory=list)
    is_decode: bool = False

    @classmethod
    def of(cls, samples: Sequence[Sample], decoded: list[int] | None) -> Batch:
        """What the scheduler has granted to the running samples. decoded: the last token of each, if that is all."""
        computed = [sample.num_computed for sample in samples]
        if decoded is not None:
            return cls(decoded, computed, ready=list(zip(samples, range(len(samples)), strict=True)), is_decode=True)
        if all(sample.work == 1 and not sample.draft for sample in samples):
            ids = [sample.tokens[at] for sample, at in zip(samples, computed, strict=True)]
            ready = [(s, row) for row, s in enumerate(samples) if computed[row] + 1 == len(s.tokens)]
            return cls(ids, computed, ready=ready)
        batch = cls([], computed, [], [])
        for sample in samples:
            batch._add(sample)
        return batch

    def _add(self, sample: Sample) -> None:
        stop = sample.num_computed + sample.work
        self.token_ids += sample.tokens[sample.num_computed : stop] + sample.draft
        assert self.num_new is not None
        self.num_new.append(sample.work + len(sample.draft))
        if sample.work and stop == len(sample.tokens):
            self.ready.append((sample, len(self.logits_at)))
            end = len(self.token_ids)
            self.logits_at += range(end - 1 - len(sample.draft), end)
