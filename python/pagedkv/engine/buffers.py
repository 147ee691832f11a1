"""The static buffers that a packed forward reads, and views of them for one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..block_table import BlockTable
from ..errors import InvalidArgumentError
from ..hf.kv_pool import Pool
from ..hf.sizing import total_memory
from ..hf.state import Asked, PagedState
from ..hf.step import Step
from .batch import Batch

_MIN_ROOM = 4  # tokens of the buffers: T and L are traced as 4 and 2, as equal sizes would count as one size


class PackedStep(Step):
    """A step as long as its slots: a traced forward takes its length from a tensor's shape, not from a number."""

    @property
    def query_length(self) -> int:  # type: ignore[override]
        return self.slot_mapping.shape[0]


class PackedState(PagedState):
    """The state of a cache whose forwards are one row of many sequences; the runner fills the steps itself."""

    def __init__(self, pool: Pool, layers: Sequence[Any], steps: dict[tuple[int, torch.device], PackedStep]) -> None:
        self.steps = steps
        super().__init__(pool, layers)

    @property
    def query_length(self) -> int:
        return next(iter(self.steps.values())).query_length

    @query_length.setter
    def query_length(self, value: int) -> None: ...  # the base class begins with a number

    forward_length = query_length

    def step(self, group: int, device: torch.device) -> Step:
        if (group, device) not in self.steps:
            raise NotImplementedError(f"its layers are on several devices ({device} and others)")
        return self.steps[group, device]

    def ask(self, asked: Asked) -> None:
        self.plan(asked.mask, *asked.size, asked.dense)

    def plan(self, attention_mask: Tensor | None, batch: int, query_length: int, dense: bool = False) -> None:
        if dense or batch != 1 or query_length != self.query_length:
            raise NotImplementedError("its attention is more than causal and windowed, or does not follow position_ids")


@dataclass(slots=True)
class Inputs:
    """Views of the static buffers, for one forward of T tokens.

    Attributes:
        groups: per group of layers slot_mapping [T], block_table [B, W], seq_lens [B], and cu_seqlens_q [B+1], which is
            None where every sequence has one token.
        ids, positions: [1, T].
        logits_at: [L] tokens whose logits are wanted; None: all.
    """

    groups: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]
    ids: Tensor
    positions: Tensor
    logits_at: Tensor | None

    def mark_dynamic(self) -> None:
        """Lets T and L (and B, where it is T) be of any size from 2 on in what is traced next."""
        marks = [(self.ids, 1), (self.positions, 1), (self.logits_at, 0)]
        for slots, table, lengths, offsets in self.groups:
            marks += [(slots, 0)] + ([(table, 0), (lengths, 0)] if offsets is None else [])
        for tensor, dim in marks:
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, dim)


class Buffers:
    """Token ids and positions, and a block table per group of layers; row r is the r-th running sample.

    Raises:
        InvalidArgumentError: they need more than the device has.
    """

    def __init__(self, pool: Pool, num_seqs: int, num_tokens: int, device: torch.device) -> None:
        size, width = max(num_tokens, _MIN_ROOM), pool.table_width
        _check_room(num_seqs, size, width, len(pool.windows), device)
        self.tables = [BlockTable(num_seqs, width, size, pool.block_size, device=device) for _ in pool.windows]
        self._host_tokens = torch.zeros((2, size), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.tokens: npt.NDArray[np.int64] = self._host_tokens.numpy()  # ids, positions
        on_cpu = device.type == "cpu"
        self._device_tokens = self._host_tokens if on_cpu else torch.zeros_like(self._host_tokens, device=device)

    @property
    def num_tokens(self) -> int:
        """The most that a forward computes."""
        return len(self.tokens[0])

    def views(self, total: int, num_seqs: int | None, logits_at: Tensor | None = None, decode: bool = True) -> Inputs:
        """`total` tokens of `num_seqs` rows, one each in decode; None: of any rows of the whole tables."""
        groups: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
        for table in self.tables:
            tensors = table.tensors
            rows = table.max_num_seqs if num_seqs is None else num_seqs
            offsets = None if decode and num_seqs is not None else tensors["cu_seqlens_q"][: rows + 1]
            block_table, seq_lens = tensors["block_table"][:rows], tensors["seq_lens"][:rows]
            groups.append((tensors["slot_mapping"][:total], block_table, seq_lens, offsets))
        ids, positions = self._device_tokens[:, None, :total]  # [1, T] each
        return Inputs(groups, ids, positions, logits_at)

    def clear(self) -> None:
        """Nothing but padding."""
        for table in self.tables:
            table.fill([])
            table.upload()

    def write(self, batch: Batch, size: int) -> None:
        """What a forward of so many tokens, padding included, reads."""
        for table in self.tables:
            table.fill(batch.num_computed, batch.num_new)
            table.upload(len(batch.num_computed))
        self._write_tokens(batch, size)

    def _write_tokens(self, batch: Batch, size: int) -> None:
        """Ids and positions of a forward, and zeros up to its size."""
        total, num_new = len(batch.token_ids), batch.num_new
        num_computed = np.asarray(batch.num_computed, np.int64)
        self.tokens[0, :total] = batch.token_ids
        if num_new is None:
            self.tokens[1, :total] = num_computed
        else:
            starts = np.cumsum(num_new) - num_new
            self.tokens[1, :total] = np.arange(total) + np.repeat(num_computed - starts, num_new)
        self.tokens[:, total:size] = 0
        if self._device_tokens is not self._host_tokens:
            self._device_tokens[:, :size].copy_(self._host_tokens[:, :size])  # the next step writes the host side again


def _check_room(num_seqs: int, num_tokens: int, table_width: int, num_groups: int, device: torch.device) -> None:
    words = 2 * num_tokens + num_groups * (num_tokens + num_seqs * (table_width + 2) // 2)  # of 8 bytes
    total = total_memory(device)
    if 8 * words > total:
        names, got = "max_num_seqs, max_num_batched_tokens", f"{num_seqs}, {num_tokens} ({8 * words} bytes)"
        raise InvalidArgumentError(f"{names}: expected buffers of at most the {total} bytes of {device}, got {got}")
