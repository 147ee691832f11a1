"""Index tensors of a forward, and how they are made for several columns per row with padding anywhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rows import Ints, Rows


class Step:
    """Index tensors of one forward, for the layers of one group on one device.

    Attributes:
        slot_mapping: [B*L] int64. block_table: [S, W] int32 and seq_lens: [S] int32, S sequences.
        cu_seqlens_q: [S+1] int32; None: one query token per sequence.
        order: [B*L] int64, packed token -> query token; None: the packed order is row after row. inverse: its inverse.
        appends: the keys of a layer are written by its attention, in one op, or by whoever planned the forward.
        dense: attention over gathered keys in this forward, because its mask is more than causal and windowed.
    """

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    appends = False
    dense = False
    query_length = 0


class Packing:
    """Where the tokens of B rows of L columns are written, and which keys each sees.

    Left-padded rows are sequences of L query tokens: masks are aligned at the end, so that padding before the first
    token sees nothing. With padding elsewhere the real tokens of a row form a sequence, and each padding column is a
    sequence of one query over the real tokens before it, as in a dense masked attention.

    Args:
        valid: [B, L] real tokens.
        starts: [B] tokens of each row before this forward. held: [B] tokens whose keys are in the cache already.
    """

    def __init__(self, rows: Rows, valid: NDArray[np.bool_], starts: Ints, held: Ints) -> None:
        batch, length = valid.shape
        self.rows = rows
        self.width = rows.pool.table_width
        self._write = valid & (rows.leaders == np.arange(batch))[:, None]
        self._positions = starts[:, None] + np.cumsum(valid, 1) - 1  # of real tokens
        self._write &= self._positions >= held[:, None]
        counts = valid.sum(1)
        self.order: Ints | None = None
        ends_real = (np.diff(valid.astype(np.int8), axis=1) >= 0).all(1) & ((counts == length) | (starts == 0))
        if ends_real.all():
            self.sequence_rows = np.arange(batch)
            self.seq_lens = rows.lengths
            query_lengths = np.full(batch, length)
        else:
            flat = valid.reshape(-1)
            padding = np.flatnonzero(~flat)
            self.order = np.concatenate([np.flatnonzero(flat), padding])
            self.sequence_rows = np.concatenate([np.arange(batch), padding // length])
            self.seq_lens = np.concatenate([rows.lengths, self._positions.reshape(-1)[padding] + 1])
            query_lengths = np.concatenate([counts, np.ones(len(padding), np.int64)])
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lengths)])
        self.tokens: Ints | None = None
        self._valid = valid

    @property
    def can_pack(self) -> bool:
        """Some tokens need not be computed, and every row ends with a real one."""
        return bool(self._valid[:, -1].all()) and not (self._valid.all() and self.rows.is_split)

    def pack(self) -> tuple[Ints, Ints]:
        """Leave out padding and the tokens of followers.

        Returns:
            tokens: [T] which of the B*L columns are computed; last: [B] which of those tokens is each row's last.
        """
        leaders, rank = np.unique(self.rows.leaders, return_inverse=True)
        counts = self._valid.sum(1)[leaders]
        computed = np.zeros_like(self._valid)
        computed[leaders] = self._valid[leaders]
        self.tokens = np.flatnonzero(computed)
        self.order = None
        self.sequence_rows, self.seq_lens = leaders, self.rows.lengths[leaders]
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum(counts)])
        return self.tokens, self.cu_seqlens_q[1:][rank] - 1

    def fill(self, step: Step, group: int, device: torch.device) -> None:
        """Set the step's tensors for one group of layers."""
        blocks = self.rows.blocks[group]
        table = np.zeros((len(blocks), self.width), np.int32)
        for row, ids in enumerate(blocks):
            table[row, : len(ids)] = ids
        size = self.rows.block_size
        position = np.where(self._write, self._positions, 0)
        slots = np.take_along_axis(table, position // size, 1).astype(np.int64) * size + position % size

        def send(array: NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        slots = np.where(self._write, slots, -1).reshape(-1)
        step.slot_mapping = send(slots if self.tokens is None else slots[self.tokens])
        step.block_table = send(table[self.sequence_rows])
        step.seq_lens = send(self.seq_lens.astype(np.int32))
        step.cu_seqlens_q = send(self.cu_seqlens_q.astype(np.int32))
        step.order = step.inverse = None
        if self.order is not None:
            step.order, step.inverse = send(self.order), send(np.argsort(self.order))
