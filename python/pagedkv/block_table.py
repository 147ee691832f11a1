"""The static buffers a model step reads: block table, slot mapping, sequence lengths and query offsets.

All four are views of one host buffer and of one device buffer. A step copies slots, lengths and offsets, and of the
table only the entries that have changed; on CPU both sides are the same memory and nothing is copied. Addresses and
shapes never change: a captured graph stays valid. Each view begins at a multiple of 16 bytes, as kernels are compiled
for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedkv.errors import InvalidArgumentError, integer, refused
from pagedkv.manager.blocks import NULL_BLOCK
from pagedkv.transfers import Staging, current

PADDING_SLOT = -1
NAMES = ("slot_mapping", "block_table", "seq_lens", "cu_seqlens_q")


Ints = Sequence[int] | npt.NDArray[np.integer]
_IDS = f"a sequence of ints in 0..{2**31 - 1}"
_NO_IDS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class BlockTable:
    """Rows of block ids for up to `max_num_seqs` sequences, and the slots of one step's tokens.

    Row r is the r-th sequence of the batch: rows are kept without gaps (`move_row`). Entries past a row's blocks are
    the null block, slots past the step's tokens -1, and rows past the batch empty, whatever was there before.

    Args:
        max_num_seqs, max_num_blocks: rows and columns of the table.
        max_num_tokens: slots of a step, over all its sequences.
        block_size: tokens per block.
        device: where the kernels read; the host side is pinned when that is CUDA.

    Attributes (host numpy views, and device tensors with the same shapes in `tensors`):
        block_table [max_num_seqs, max_num_blocks] int32, slot_mapping [max_num_tokens] int64,
        seq_lens [max_num_seqs] int32, cu_seqlens_q [max_num_seqs + 1] int32.

    Raises:
        InvalidArgumentError: a size below 1; in the methods a row or a count that does not fit, or what are no block
            ids. Nothing changes then.

    Example:
        >>> table = BlockTable(max_num_seqs=2, max_num_blocks=4, max_num_tokens=8, block_size=16)
        >>> table.set_row(0, [5, 2])
        >>> table.append_row(0, [7])
        >>> table.upload()
        >>> table.tensors["block_table"].tolist()
        [[5, 2, 7, 0], [0, 0, 0, 0]]
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_blocks: int,
        max_num_tokens: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_num_seqs = max_num_seqs = integer("max_num_seqs", max_num_seqs, 1)
        self.max_num_blocks = max_num_blocks = integer("max_num_blocks", max_num_blocks, 1)
        self.max_num_tokens = max_num_tokens = integer("max_num_tokens", max_num_tokens, 1)
        self.block_size = integer("block_size", block_size, 1)
        self.device = torch.device(device)
        self._most_entries = 2 * max_num_seqs + max_num_tokens // block_size  # that are sent one by one
        # the table comes last: of a step only what lies before it is copied whole
        sizes = (
            2 * max_num_tokens,
            max_num_seqs,
            max_num_seqs + 1,
            4 * self._most_entries,
            max_num_seqs * max_num_blocks,
        )
        self._staging = Staging(self.device, *sizes)
        with torch.inference_mode(False):
            host, self.tensors = self._views(self._staging.host), self._views(self._staging.sent)
        self._host_table = host["block_table"]
        self.slot_mapping: npt.NDArray[np.int64] = host["slot_mapping"].numpy()
        self.seq_lens: npt.NDArray[np.int32] = host["seq_lens"].numpy()
        self.cu_seqlens_q: npt.NDArray[np.int32] = host["cu_seqlens_q"].numpy()
        self.block_table: npt.NDArray[np.int32] = host["block_table"].numpy()
        self.slot_mapping[:] = PADDING_SLOT
        self.row_blocks = np.zeros(max_num_seqs, np.int64)  # entries in use, per row
        self._rows = np.arange(max_num_seqs + 1)
        self._changed: list[npt.NDArray[np.int64]] = []  # places of the table that the device does not know
        self.upload()

    def _views(self, arrays: list[Tensor]) -> dict[str, Tensor]:
        slots, lengths, offsets, _, table = arrays
        table = table.view(self.max_num_seqs, self.max_num_blocks)
        return dict(zip(NAMES, (slots.view(torch.int64), table, lengths, offsets), strict=True))

    # Rows.

    def set_row(self, row: int, block_ids: Ints) -> None:
        """Put a whole table into a row; what the row held behind it is cleaned."""
        ids = _checked(block_ids)
        count = len(ids)
        self._check_row(row, count)
        self._staging.wait()
        entries = self.block_table[row, : max(count, int(self.row_blocks[row]))]
        before = entries.copy()
        entries[:count] = ids
        entries[count:] = NULL_BLOCK
        self.row_blocks[row] = count
        self._note(row * self.max_num_blocks + np.flatnonzero(entries != before))

    def append_row(self, row: int, block_ids: Ints) -> None:
        """Add blocks at the end of a row."""
        ids = _checked(block_ids)
        if not len(ids):
            return
        self._check_row(row, 0)
        start = int(self.row_blocks[row])
        self._check_row(row, start + len(ids))
        self._staging.wait()
        self.block_table[row, start : start + len(ids)] = ids
        self.row_blocks[row] = start + len(ids)
        self._note(np.arange(start, start + len(ids)) + row * self.max_num_blocks)

    def set_entries(self, rows: Ints, columns: Ints, block_ids: Ints) -> None:
        """Write single entries: new blocks behind rows, copies in their places. One call for a whole batch."""
        ids = _checked(block_ids)
        if not len(rows) == len(columns) == len(ids):
            lengths = f"{len(rows)}, {len(columns)} and {len(ids)}"
            raise InvalidArgumentError(f"rows, columns, block_ids: expected equally many, got {lengths}")
        if not len(rows):
            return
        # on lists of a few entries python's min and max take a third of numpy's time
        lowest, last_row, last_column = min(min(rows), min(columns)), max(rows), max(columns)
        if lowest < 0 or last_row >= self.max_num_seqs or last_column >= self.max_num_blocks:
            raise InvalidArgumentError(
                f"rows, columns: expected entries of a {self.max_num_seqs} x {self.max_num_blocks} table, got "
                f"{list(rows)} and {list(columns)}"
            )
        self._staging.wait()
        self.block_table[rows, columns] = ids
        np.maximum.at(self.row_blocks, rows, np.asarray(columns) + 1)
        self._note(np.asarray(rows, np.int64) * self.max_num_blocks + np.asarray(columns, np.int64))

    def clear_row(self, row: int) -> None:
        self.set_row(row, ())

    def move_row(self, source: int, destination: int) -> None:
        """Move a row, leaving an empty one: the last row into the place of a finished one, say."""
        self._check_row(source, 0)
        count = int(self.row_blocks[source])
        self.set_row(destination, self.block_table[source, :count])
        if source != destination:
            self.clear_row(source)

    # A step.

    def fill(
        self,
        num_computed: Ints,
        num_new: Ints | None = None,
    ) -> int:
        """Write lengths, query offsets and slots of a batch, and clean what lies behind it.

        num_computed: tokens written before, per sequence. num_new: tokens of this step, one each by default.
        Returns the number of tokens. Rows from len(num_computed) on are emptied.
        """
        computed = np.asarray(num_computed, np.int64)
        num_seqs = len(computed)
        fresh = None if num_new is None else np.asarray(num_new, np.int64)
        lengths = self._check_step(computed, fresh)
        self._staging.wait()
        if fresh is None:
            rows, positions, total = self._rows[:num_seqs], computed, num_seqs
            self.cu_seqlens_q[: num_seqs + 1] = self._rows[: num_seqs + 1]
        else:
            ends = np.cumsum(fresh)
            total = int(ends[-1]) if num_seqs else 0
            rows = np.repeat(self._rows[:num_seqs], fresh)
            positions = np.arange(total) + np.repeat(computed - ends + fresh, fresh)
            self.cu_seqlens_q[0] = 0
            self.cu_seqlens_q[1 : num_seqs + 1] = ends
        blocks, offsets = np.divmod(positions, self.block_size)
        self.slot_mapping[:total] = self.block_table[rows, blocks].astype(np.int64) * self.block_size + offsets
        self.slot_mapping[total:] = PADDING_SLOT
        self.seq_lens[:num_seqs] = lengths
        self.seq_lens[num_seqs:] = 0
        self.cu_seqlens_q[num_seqs + 1 :] = total
        for row in np.flatnonzero(self.row_blocks[num_seqs:]) + num_seqs:
            self.clear_row(int(row))
        return total

    def upload(self) -> None:
        """Send the device what it does not know yet, without waiting: slots, lengths and offsets in one copy.

        Entries of the table that have changed go with them, and from there into their places; where more have changed
        than can be expected of a step, their rows are copied.
        """
        staging, places = self._staging, _NO_IDS
        if not staging.is_copied:
            return
        staging.wait()
        if self._changed:
            places = np.concatenate(self._changed)
            self._changed.clear()
        with current(self.device):
            table = self.tensors["block_table"]
            if len(places) > self._most_entries:
                part = slice(int(places.min()) // self.max_num_blocks, int(places.max()) // self.max_num_blocks + 1)
                table[part].copy_(self._host_table[part], non_blocking=True)
                places = _NO_IDS
            entries = staging.host[3].view(torch.int64).view(-1, 2)[: len(places)].numpy()  # places, ids
            entries[:, 0], entries[:, 1] = places, self.block_table.reshape(-1)[places]
            staging.send(3, 4 * len(places))
            if len(places):
                sent = staging.sent[3][: 4 * len(places)]
                table.view(-1).index_put_((sent.view(torch.int64)[::2],), sent[2::4])

    def _note(self, places: npt.NDArray[np.int64]) -> None:
        if self._staging.is_copied and len(places):
            self._changed.append(places)

    def _check_row(self, row: int, num_blocks: int) -> None:
        if not 0 <= row < self.max_num_seqs:
            raise InvalidArgumentError(f"row: expected 0..{self.max_num_seqs - 1}, got {row}")
        if num_blocks > self.max_num_blocks:
            raise InvalidArgumentError(f"block_ids: expected at most {self.max_num_blocks} in a row, got {num_blocks}")

    def _check_step(
        self, computed: npt.NDArray[np.int64], fresh: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.int64]:
        """The lengths after the step."""
        num_seqs = len(computed)
        if (fresh is not None and len(fresh) != num_seqs) or num_seqs > self.max_num_seqs:
            raise InvalidArgumentError(
                f"num_computed, num_new: expected equally many, at most {self.max_num_seqs}, got {num_seqs} and "
                f"{num_seqs if fresh is None else len(fresh)}"
            )
        lengths = computed + (1 if fresh is None else fresh)
        if num_seqs == 0:
            return lengths
        total = num_seqs if fresh is None else fresh.sum()
        if total > self.max_num_tokens or computed.min() < 0 or (fresh is not None and fresh.min() < 0):
            raise InvalidArgumentError(
                f"num_computed, num_new: expected at least 0 each and at most {self.max_num_tokens} new together, got "
                f"{computed.tolist()} and {'one each' if fresh is None else fresh.tolist()}"
            )
        short = lengths > self.row_blocks[:num_seqs] * self.block_size
        if short.any():
            row = int(np.flatnonzero(short)[0])
            raise InvalidArgumentError(
                f"row {row}: {self.row_blocks[row]} blocks of {self.block_size} do not hold {lengths[row]} tokens"
            )
        return lengths


def _checked(block_ids: Any) -> npt.NDArray[np.integer]:
    """Block ids as an array; assignment alone would cut fractions off and take negative ids."""
    try:
        if not len(block_ids):
            return _NO_IDS
        ids = np.asarray(block_ids)
    except (TypeError, ValueError):
        raise refused("block_ids", _IDS, block_ids) from None
    # the bits of all ids together: one pass for both ends of the range
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= np.bitwise_or.reduce(ids) < 2**31:
        raise refused("block_ids", _IDS, block_ids)
    return ids
