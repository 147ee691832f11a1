"""The static buffers that a packed forward reads, and views of them for one forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..block_table import BlockTable
from ..errors import InvalidArgumentError
from ..hf.kv_pool import Pool
from ..hf.paged_layers import INDICES
from ..hf.pool_size import total_memory
from ..transfers import Staging, current
from .batch import Batch

_MIN_ROOM = 4  # tokens of the buffers: T and L are traced as 4 and 2, as equal sizes would count as one size


@dataclass(slots=True)
class Inputs:
    """Views of the static buffers, for one forward of T tokens.

    Attributes:
        indices: for the attention of every layer, a tensor for each group of layers: slot_mapping [T], block_table
            [B, W], seq_lens [B], and cu_seqlens_q [B+1], which is None where every sequence has one token.
        ids, positions: [1, T].
        logits_at: [L] tokens whose logits are wanted; None: all.
    """

    indices: dict[str, tuple[Tensor, ...] | None]
    ids: Tensor
    positions: Tensor
    logits_at: Tensor | None

    def mark_dynamic(self) -> None:
        """Let T and L (and B, where it is T) be of any size from 2 on in what is traced next."""
        marks = [(self.ids, 1), (self.positions, 1), (self.logits_at, 0)]
        names = INDICES[:1] if self.indices["cu_seqlens_q"] else INDICES[:3]
        marks += [(tensor, 0) for name in names for tensor in self.indices[name] or ()]
        for tensor, dim in marks:
            if tensor is not None and tensor.shape[dim] > 1:
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
        self._staging = Staging(device, 2 * size, 2 * size, 2 * size)
        self._ids, self._positions, self._logits_at = (part.view(torch.int64).numpy() for part in self._staging.host)
        # [1, T], [1, T] and [L]
        ids, positions, self.logits_at = (part.view(torch.int64) for part in self._staging.sent)
        self._tokens = ids[None], positions[None]

    @property
    def num_tokens(self) -> int:
        """The most that a forward computes."""
        return len(self._ids)

    def views(self, total: int, num_seqs: int | None, logits_at: Tensor | None = None, decode: bool = True) -> Inputs:
        """`total` tokens of `num_seqs` rows, one each in decode; None: of any rows of the whole tables."""
        rows = self.tables[0].max_num_seqs if num_seqs is None else num_seqs
        sizes = dict(zip(INDICES, (total, rows, rows, rows + 1), strict=True))
        indices: dict[str, tuple[Tensor, ...] | None] = {
            name: tuple(table.tensors[name][:size] for table in self.tables) for name, size in sizes.items()
        }
        if decode and num_seqs is not None:
            indices["cu_seqlens_q"] = None
        ids, positions = (part[:, :total] for part in self._tokens)
        return Inputs(indices, ids, positions, logits_at)

    def clear(self) -> None:
        """Nothing but padding."""
        for table in self.tables:
            table.fill([])
            table.upload()

    def write(self, batch: Batch, size: int, num_logits: int = 0) -> None:
        """What a forward of so many tokens and logits, padding included, reads."""
        for table in self.tables:
            table.fill(batch.num_computed, batch.num_new)
            table.upload()
        self._staging.wait()
        total, num_new = len(batch.token_ids), batch.num_new
        self._ids[:total] = batch.token_ids
        if num_new is None:
            self._positions[:total] = batch.num_computed
        else:
            starts = np.cumsum(num_new) - num_new
            self._positions[:total] = np.arange(total) + np.repeat(np.asarray(batch.num_computed) - starts, num_new)
            count = len(batch.logits_at)
            self._logits_at[:count] = batch.logits_at
            self._logits_at[count:num_logits] = 0
        self._ids[total:size] = self._positions[total:size] = 0
        if self._staging.is_copied:
            with current(self._staging.device):
                self._staging.send(2, 2 * num_logits)


def _check_room(num_seqs: int, num_tokens: int, table_width: int, num_groups: int, device: torch.device) -> None:
    words = 2 * num_tokens + num_groups * (num_tokens + num_seqs * (table_width + 2) // 2)  # of 8 bytes
    total = total_memory(device)
    if 8 * words > total:
        names, got = "max_num_seqs, max_num_batched_tokens", f"{num_seqs}, {num_tokens} ({8 * words} bytes)"
        raise InvalidArgumentError(f"{names}: expected buffers of at most the {total} bytes of {device}, got {got}")
