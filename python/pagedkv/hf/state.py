"""What one PagedCache knows about its batch, and the index tensors that each forward reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidArgumentError, OutOfBlocksError
from .identity import Identity
from .kv_pool import Pool
from .rows import Ints, Rows
from .step import Packing, Step
from .untraced import untraced

Bools = NDArray[np.bool_]


@dataclass(slots=True)
class Asked:
    """What a model has asked a mask for.

    Attributes:
        mask: [B, columns] real tokens; None: all. batch, query_length: of the queries.
        dense: the mask is more than causal and windowed.
    """

    mask: Tensor | None
    batch: int
    query_length: int
    dense: bool

    @property
    def size(self) -> tuple[int, int]:
        return self.batch, self.query_length


class PagedState:
    """Columns are what transformers counts: padding included. Rows hold the real tokens only.

    Attributes:
        columns: columns before the planned forward. query_length: its columns. forward_length: length of its inputs,
            another one where they are packed.
        identity: of the model that computed the tokens; None: nothing is published.
        token_ids: [B, any], ends with the ids of the planned forward's columns, where a caller knows them.
        copies: rows that come in groups of this many equal ones (beams, returned sequences).
    """

    def __init__(self, pool: Pool, layers: Sequence[Any]) -> None:
        self.pool = pool
        self.layers = list(layers)
        self.rows: Rows | None = None
        self.columns = 0
        self.query_length = 0
        self.forward_length = 0
        self.copies = 1
        self.identity: Identity | None = None
        self.token_ids: Tensor | None = None
        self.seqs: list[int] = []  # of the rows; outlives them for the finalizer
        self._valid: list[Bools] = []  # [B, L] per forward: real tokens
        self._steps: dict[tuple[int, torch.device], Step] = {}
        self._owner = object()
        self._batch = 0
        self._appends = self._dense = False
        self._packing: Packing | None = None
        self.has_encoder = False  # its model is an encoder-decoder
        self.is_asked = False  # for the sizes of a mask, since the last plan
        self.asked: Asked | None = None  # the mask itself
        self._failed = False  # a forward ended early: keys that rows count are missing

    @property
    def is_pending(self) -> bool:
        """A forward is planned and no layer has taken part in it."""
        return self.query_length > 0 and not any(layer.done for layer in self.layers)

    @property
    def _is_unfinished(self) -> bool:
        """Some layer has not written the keys of the planned forward."""
        written = (layer.done and layer.pending is None for layer in self.layers if layer.spec is not None)
        return self.query_length > 0 and not all(written)

    @property
    def batch(self) -> int:
        return 0 if self.rows is None else self.rows.batch

    @property
    def seen(self) -> int:
        """Columns after the planned forward, if it ran."""
        return self.columns if self.is_pending else self.columns + self.query_length

    def step(self, group: int, device: torch.device) -> Step:
        """The step of a group on a device; filled by every plan from then on."""
        step = self._steps.get((group, device))
        if step is None:
            step = self._steps[group, device] = Step()
            self._fill_step(step, group, device)
        return step

    def index_tensors(self) -> list[Tensor]:
        """What a decode forward reads of the steps: [B, ...] each."""
        return [
            tensor for step in self._steps.values() for tensor in (step.slot_mapping, step.block_table, step.seq_lens)
        ]

    def ask(self, asked: Asked) -> None:
        """Note the mask that a model asks for, for the plan of its next forward or for the one that is planned."""
        if self.is_pending and asked.size == (self._batch, self.query_length):
            self._set_dense(asked.dense or self._dense)
            return
        if self.asked is not None and self.asked.size == asked.size:
            asked.dense |= self.asked.dense
        self.asked = asked

    def is_planned_for(self, layer: Any, length: int) -> bool:
        """The layer may write so many columns now."""
        return self.asked is None and not layer.done and self.forward_length == length

    @untraced
    def plan_unpatched(self, batch: int, query_length: int) -> None:
        """Plan a forward of a model that is not patched, at its first write.

        Raises:
            NotImplementedError: no mask was asked for in an encoder-decoder model: the keys are of its cross-attention.
        """
        if self.has_encoder and not self.is_asked:
            raise NotImplementedError(
                "PagedCache: expected the self-attention of an encoder-decoder model, got its cross-attention; give "
                "the model an EncoderDecoderCache(PagedCache(config), DynamicCache())"
            )
        if self.asked is not None and self.asked.size == (batch, query_length):
            self.plan(self.asked.mask, batch, query_length, self.asked.dense)
        else:  # it masks by columns itself
            self.plan(None, batch, query_length, dense=True)

    @untraced
    def plan(
        self,
        attention_mask: Tensor | None,
        batch: int,
        query_length: int,
        dense: bool = False,
        writes_pending: bool = False,
    ) -> None:
        """Give the next ``query_length`` columns their slots and fill the steps.

        Args:
            attention_mask: [B, columns], true for real tokens, the columns before included; None: all are real.
            dense: see :class:`Step`.
            writes_pending: the caller calls :meth:`write_pending` behind the forward, which keys may wait for.

        Raises:
            ValueError: there are no columns, or the mask or the batch does not continue what the cache holds.
            OutOfBlocksError: the pool has too few blocks; nothing was changed.
        """
        if query_length == 0:
            raise ValueError("input_ids: expected at least one token a row, got none")
        self.is_asked, self.asked = False, None
        if self.is_pending:  # no layer took part in the last one
            self.rollback(self.query_length)
        self._advance(failed=self._is_unfinished)
        failed = self._failed
        self._grow(attention_mask, batch, query_length)
        self._batch, self.query_length, self._dense = batch, query_length, dense
        self.forward_length = query_length
        self._appends = writes_pending and self._packing is None
        for (group, device), step in self._steps.items():
            self._fill_step(step, group, device)
        for layer in self.layers:
            layer.done, layer.pending = False, None
            if layer.step is None and layer.spec is not None:
                layer.attach()
        self._failed = failed
        if self._packing is None and self.rows is not None:
            self.rows.changed.clear()

    def _grow(self, attention_mask: Tensor | None, batch: int, query_length: int) -> None:
        """Make room for the new columns' real tokens in their rows."""
        if batch == 0:
            raise InvalidArgumentError("input_ids: expected at least one row, got a batch of none")
        rows = self._rows(batch)
        valid = self._new_valid(attention_mask, query_length)
        ids = self._new_ids(batch, query_length)
        if not rows.is_split and (query_length == 1 or not _rows_equal(ids, valid, self.copies)):
            rows.split()
        rows.hold = self._failed or any(
            getattr(layer, "record_past", False) and layer.is_sliding for layer in self.layers
        )
        starts = rows.lengths.copy()
        tokens = _real_ids(ids, valid) if self.identity is not None else None
        failed, self._failed = self._failed, True  # until the layers tell what is written
        try:
            held = rows.grow(valid.sum(1), tokens)
        except OutOfBlocksError:  # nothing was changed
            self._failed = failed
            raise
        self.pool.fit_tables(max(len(ids) for blocks in rows.blocks for ids in blocks))
        self.pool.apply_moves()
        self._valid.append(valid)
        is_packed = query_length > 1 or not valid.all()
        self._packing = Packing(rows, valid, starts, held) if is_packed else None

    def set_done(self, done: bool) -> None:
        """All layers have written the planned forward's keys, or none."""
        for layer in self.layers:
            layer.done, layer.pending = done, None

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """The planned forward runs inside without writing a key: it is captured."""
        failed, self._failed = self._failed, True
        try:
            yield
        finally:
            self.set_done(False)
            self._failed = failed

    @untraced
    def write_pending(self) -> None:
        """Write what the attention of the forward that has just run did not."""
        for layer in self.layers:
            layer.write_pending()

    @property
    def can_pack(self) -> bool:
        """See :meth:`Packing.can_pack`."""
        return self._packing is not None and self._packing.can_pack

    def pack(self) -> tuple[Ints, Ints]:
        """Let the planned forward compute the real tokens of distinct rows, as one row: see :meth:`Packing.pack`."""
        assert self._packing is not None
        tokens, last = self._packing.pack()
        self._batch, self.forward_length = 1, len(tokens)
        for (group, device), step in self._steps.items():
            self._fill_step(step, group, device)
        return tokens, last

    def _advance(self, failed: bool) -> None:
        self._failed |= failed
        self.columns += self.query_length
        self.query_length = 0

    def _rows(self, batch: int) -> Rows:
        if self.rows is None:
            copies = self.copies if batch % self.copies == 0 else 1
            self.start(batch, copies)
        assert self.rows is not None
        if self.rows.batch != batch:
            raise ValueError(f"PagedCache: batch must be {self.rows.batch} like the rows it holds, got {batch}")
        return self.rows

    def start(self, batch: int, copies: int, prompts: Sequence[Sequence[int]] | None = None) -> Any:
        """Register the rows; returns how many tokens of each prompt are cached."""
        self.rows = Rows(self.pool, batch, copies)
        self.rows.seqs = self.seqs
        return self.rows.start(prompts, (self.identity and self.identity.keys) or ())

    def skip(self, valid: Bools) -> None:
        """Count columns whose tokens a cached prefix holds."""
        assert self.rows is not None
        self._valid.append(valid)
        self.rows.lengths += valid.sum(1)
        self.columns += valid.shape[1]

    def _new_valid(self, attention_mask: Tensor | None, query_length: int) -> Bools:
        assert self.rows is not None
        batch, total = self.rows.batch, self.columns + query_length
        one_real_token = attention_mask is not None and query_length == 1 and attention_mask.device.type != "cpu"
        if attention_mask is None or one_real_token:  # a decoded token is real: no device sync
            return np.ones((batch, query_length), bool)
        if attention_mask.shape[0] != batch or attention_mask.shape[1] < total:
            raise ValueError(
                f"PagedCache: attention_mask must be [{batch}, {total}], the {self.columns} cached columns included, "
                f"got {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, :total].cpu().numpy().astype(bool)
        if query_length > 1 and self.columns and not (mask[:, : self.columns] == self.valid()).all():
            raise ValueError("PagedCache: attention_mask must mark the cached columns as it did when they were cached")
        return mask[:, self.columns :]

    def _new_ids(self, batch: int, query_length: int) -> NDArray[np.int64] | None:
        wanted = self.identity is not None or (self.rows is not None and not self.rows.is_split and query_length > 1)
        if not wanted or self.token_ids is None or self.token_ids.shape[0] != batch:
            return None
        if self.token_ids.shape[1] < query_length:
            return None
        return self.token_ids[:, -query_length:].cpu().numpy()

    def valid(self) -> Bools:
        """[B, seen columns]: real tokens."""
        return np.concatenate(self._valid, 1) if self._valid else np.ones((0, 0), bool)

    @property
    def has_padding(self) -> bool:
        return not all(valid.all() for valid in self._valid)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row, the planned ones included."""
        return 0 if self.rows is None else int(self.rows.lengths.max())

    def column_index(self, device: torch.device) -> Tensor:
        """[B, columns] int64: the token of each column; any for padding."""
        index = np.maximum(np.cumsum(self.valid(), 1) - 1, 0)
        return torch.from_numpy(index).to(device)

    def rollback(self, columns: int) -> None:
        """Forget the last columns.

        Raises:
            ReleasedPositionError: a window has given back what the next token would see.
        """
        self._advance(failed=self._is_unfinished and columns < self.query_length)
        columns = min(columns, self.columns)
        if not columns or self.rows is None:
            return
        valid = self.valid()
        keep = self.columns - columns
        for row, removed in enumerate(valid[:, keep:].sum(1).tolist()):
            self.rows.truncate(row, int(self.rows.lengths[row]) - removed)
        self._valid = [valid[:, :keep]]
        self.columns = keep

    def select(self, parents: list[int]) -> None:
        """Row i goes on from what row ``parents[i]`` holds."""
        self._check_whole()
        if self.rows is not None:
            self.rows.select(parents)
            self._valid = [valid[parents] for valid in self._valid]

    def copy(self, layers: Sequence[Any]) -> PagedState:
        """A state of ``layers`` on the same blocks; either copies a block before it writes into it."""
        self._check_whole()
        other = PagedState(self.pool, layers)
        if self.rows is not None:
            other.rows = self.rows.fork()
            other.seqs = other.rows.seqs
        other._valid = list(self._valid)
        other.columns = self.seen
        other.has_encoder = self.has_encoder
        other.identity = self.identity
        return other

    def _check_whole(self) -> None:
        """Sharing rows publishes their blocks: not those of a forward that left keys missing."""
        if self.pool.prefix_caching and (self._failed or self._is_unfinished):
            raise ValueError(
                "PagedCache: expected one whose forwards all finished, got one where a forward failed; reset it"
            )

    def clear(self) -> None:
        """Give back every block."""
        if self.rows is not None:
            self.rows.free(publish=not (self._failed or self._is_unfinished))
        self._failed = False
        self.identity = self.asked = None
        self.rows, self._valid, self._steps = None, [], {}
        self.columns = self.query_length = 0
        for layer in self.layers:
            layer.step = layer.pending = None

    def _set_dense(self, dense: bool) -> None:
        self._dense = dense
        for step in self._steps.values():
            step.dense = dense

    def _fill_step(self, step: Step, group: int, device: torch.device) -> None:
        step.appends, step.dense, step.query_length = self._appends, self._dense, self.forward_length
        if self._packing is not None:
            self._packing.fill(step, group, device)
            return
        assert self.rows is not None
        table, is_new = self.pool.static(group, self._batch, device, self._owner)
        for row in range(self._batch) if is_new else self.rows.changed:
            table.set_row(row, self.rows.blocks[group][row])
        table.fill(self.rows.lengths - 1)
        table.upload()
        step.block_table, step.seq_lens = table.tensors["block_table"], table.tensors["seq_lens"]
        step.slot_mapping = table.tensors["slot_mapping"]
        step.cu_seqlens_q = step.order = step.inverse = None


def _rows_equal(ids: NDArray[np.int64] | None, valid: Bools, copies: int) -> bool:
    """Groups of ``copies`` rows hold the same tokens."""
    if ids is None:
        return False
    groups = np.concatenate([ids, valid], 1).reshape(-1, copies, 2 * ids.shape[1])
    return bool((groups == groups[:, :1]).all())


def _real_ids(ids: NDArray[np.int64] | None, valid: Bools) -> list[list[int]] | None:
    return None if ids is None else [row[real].tolist() for row, real in zip(ids, valid, strict=True)]
