"""The cache of an engine's forwards: layers that read the block tables which a forward gets as arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import pagedkv_ops

from ..hf.cache import PagedCache
from ..hf.kv_pool import Pool
from ..hf.paged_layers import INDICES, PAGED, PagedLayer
from ..hf.state import Asked
from ..hf.tags import TAG, Columns

_WRITTEN = "_pagedkv_written"


class EngineLayer(PagedLayer):
    """One layer's blocks. `update` marks keys and values; their first attention writes them and reads the blocks, in
    one op. Further layers may attend over the same keys."""

    def __init__(self, layer: PagedLayer, state: EngineState) -> None:
        super().__init__(layer.sliding_window)
        self.mode, self.group, self.row = PAGED, layer.group, layer.row
        self.state: Any = state

    def attach(self) -> None:
        assert self.spec is not None
        device = torch.device(self.spec.device)
        if device != self.state.device:
            raise NotImplementedError(f"its layers are on several devices ({device} and others)")
        self._bind(self.state.pool.store(self.row, self.spec))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        setattr(key_states, TAG, self)
        setattr(value_states, TAG, self)
        return key_states, value_states

    def reads(self, indices: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        table, lengths, offsets = (indices[name] for name in INDICES[1:])
        return table[self.group], lengths[self.group], None if offsets is None else offsets[self.group]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, indices: dict[str, Any], **options: Any) -> Tensor:
        """[1, T, Hq, Dv] of [1, Hq, T, D] queries."""
        if not indices:
            raise NotImplementedError("its attention is not given arguments of its forward (slot_mapping and others)")
        slots = indices["slot_mapping"][self.group]
        queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [T, H, D]
        if len(queries) != len(slots):
            raise NotImplementedError("its layers attend for fewer tokens than they have keys of")
        caches = self.key_cache, self.value_cache
        table, lengths, offsets = self.reads(indices)
        if self.state.calls is not None:
            self.state.calls.append((*caches, queries, options | self.write_scales))
        if getattr(key, _WRITTEN, False):
            options |= self.read_scales
            out = pagedkv_ops.paged_attention(queries, *caches, table, lengths, offsets, **options)
        else:
            setattr(key, _WRITTEN, True)
            options |= self.write_scales
            out = pagedkv_ops.paged_attention_append(
                queries, keys, values, *caches, slots, table, lengths, offsets, **options
            )
        return out[None]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class EngineState:
    """What a mask is asked for: one row, causal and windowed by its sequences' own lengths.

    Attributes:
        calls: caches, queries and options of each call of attention; None: not kept.
    """

    seen = 0

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.pool, self.device = pool, device
        self.calls: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] | None = None

    def ask(self, asked: Asked) -> None:
        if asked.dense or asked.batch != 1:
            raise NotImplementedError("its attention is more than causal and windowed, or does not follow position_ids")


class EngineCache(Cache):  # type: ignore[misc]
    """A cache of the same layers as another one, without tokens of its own."""

    def __init__(self, like: PagedCache, pool: Pool, device: torch.device) -> None:
        self.state = EngineState(pool, device)
        kinds = [EngineLayer(x, self.state) if isinstance(x, PagedLayer) else x for x in like.layers]
        super().__init__(layers=kinds)

    @property
    def paged(self) -> list[EngineLayer]:
        return [layer for layer in self.layers if isinstance(layer, EngineLayer)]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        columns = Columns(query_length)
        columns.state = self.state
        return columns, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
