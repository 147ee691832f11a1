"""Cache layers over blocks, one class per kind of layer that transformers knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

import pagedkv_ops

from ..cache import LayerSpec, PagedKVCache
from .state import PagedState
from .step import Step
from .tags import TAG
from .untraced import untraced

UNDECIDED, PAGED, GATHERED = "undecided", "paged", "gathered"
# keyword arguments of a packed forward: a tensor per group of layers each
INDICES = ("slot_mapping", "block_table", "seq_lens", "cu_seqlens_q")


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one attention layer in blocks.

    ``mode`` is settled by the first forward. PAGED: the attention function got keys, values and mask as this layer and
    the mask function made them, and reads the blocks itself; in a decode step it writes them, too. GATHERED: the model
    does something else with them, so that every update returns dense keys and values, as the library's own layers do.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, sliding_window: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.mode = UNDECIDED
        self.done = False  # took part in the planned forward
        self.pending: tuple[Tensor, Tensor] | None = None  # keys and values that are not written yet
        self.record_past = False
        self.state: PagedState
        self.group = self.row = 0
        self.spec: LayerSpec | None = None  # known beforehand in a patched model: a compiled forward can not allocate
        self.step: Step | None = None
        self.key_cache: Tensor
        self.value_cache: Tensor
        self.write_scales: dict[str, Tensor]  # keyword arguments of the ops
        self.read_scales: dict[str, Tensor]

    @property
    def is_compileable(self) -> bool:
        return self.mode == PAGED

    @untraced
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype = self.state.pool.kv_dtype or key_states.dtype
        heads, head_size, v_head_size = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.spec = LayerSpec(heads, head_size, v_head_size, dtype, key_states.device)
        self.attach()

    def attach(self) -> None:
        """Take the pool's tensors for what :attr:`spec` says; again after the cache was cleared."""
        assert self.spec is not None
        self._bind(self.state.pool.store(self.row, self.spec))
        self.step = self.state.step(self.group, torch.device(self.spec.device))
        self.is_initialized = True

    def _bind(self, store: PagedKVCache) -> None:
        self.key_cache, self.value_cache = store.key_caches[0], store.value_caches[0]
        self.write_scales, self.read_scales = store.write_scales[0], store.read_scales[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, L, D] keys and [B, Hkv, L, Dv] values; what the attention of this layer shall read."""
        if self.step is None:
            PagedLayer.lazy_initialization(self, key_states, value_states)
        step = self.step
        assert step is not None
        self.pending = key_states, value_states
        self.done = True
        if not step.appends or self.mode != PAGED or step.dense:
            self.write_pending()
        first = self.mode == UNDECIDED and self.state.columns == 0
        if step.dense or not (first or self.mode == PAGED):
            if self.mode == UNDECIDED and not first:
                self.mode = GATHERED
            return self._gather(key_states, value_states)
        setattr(key_states, TAG, self)
        setattr(value_states, TAG, self)
        return key_states, value_states

    def write_pending(self) -> None:
        """Write the keys that no attention has taken."""
        if self.pending is not None:
            assert self.step is not None
            key, value = map(_tokens, self.pending)
            slots = self.step.slot_mapping
            pagedkv_ops.write_kv(key, value, self.key_cache, self.value_cache, slots, **self.write_scales)
            self.pending = None

    def reads(self, indices: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Block table [S, W], lengths [S] and query offsets [S+1] of a forward with these arguments."""
        assert self.step is not None
        return self.step.block_table, self.step.seq_lens, self.step.cu_seqlens_q

    def attend(self, query: Tensor, key: Tensor, value: Tensor, indices: dict[str, Any], **options: Any) -> Tensor:
        """[B, L, Hq, Dv] of [B, Hq, L, D] queries over the blocks."""
        step = self.step
        assert step is not None
        batch, num_heads, length, _ = query.shape
        packed, caches = _tokens(query), (self.key_cache, self.value_cache)
        table, lengths, offsets = self.reads(indices)
        if self.pending is not None and self.pending[0] is key and self.pending[1] is value:
            new, options = (_tokens(key), _tokens(value)), options | self.write_scales
            out = pagedkv_ops.paged_attention_append(
                packed, *new, *caches, step.slot_mapping, table, lengths, offsets, **options
            )
            self.pending = None
            return out.view(batch, length, num_heads, -1)
        self.write_pending()
        if length != step.query_length:
            # a layer that reuses another's keys may ask for the last columns only
            if step.order is not None:
                raise NotImplementedError("pagedkv: fewer queries than keys with padding inside or behind rows")
            offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        elif step.order is not None:
            packed = packed.index_select(0, step.order)
        options |= self.read_scales
        out = pagedkv_ops.paged_attention(packed, *caches, table, lengths, offsets, **options)  # [B*L, Hq, Dv]
        if step.inverse is not None:
            out = out.index_select(0, step.inverse)
        return out.view(batch, length, num_heads, -1)

    def gather(self, table: Tensor, lengths: Tensor, max_len: int) -> list[Tensor]:
        """[B, max_len, Hkv, D] keys and values, those of quantised blocks in float32."""
        scales = self.read_scales.values() or (None, None)
        return [
            pagedkv_ops.gather_kv(cache, table, lengths, max_len, scale=scale)
            for cache, scale in zip((self.key_cache, self.value_cache), scales, strict=True)
        ]

    def _gather(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Dense [B, Hkv, columns, D] keys and values, zero in padding; of all columns, or as many as a sliding layer of
        the library returns."""
        state, step = self.state, self.step
        if state.columns == 0:
            return key_states, value_states
        assert step is not None
        batch, device = key_states.shape[0], key_states.device
        table, lengths, max_len = step.block_table[:batch], step.seq_lens[:batch], state.max_length
        columns = state.column_index(device) if state.has_padding else None  # [B, columns]
        dense = []
        for gathered, new in zip(self.gather(table, lengths, max_len), (key_states, value_states), strict=True):
            tokens = gathered.to(new.dtype)  # [B, max_len, Hkv, D]
            if columns is not None:
                tokens = tokens.gather(1, columns[:, :, None, None].expand(-1, -1, *tokens.shape[2:]))
            if self.mode == GATHERED and self.sliding_window is not None:
                tokens = tokens[:, -(self.sliding_window - 1 + new.shape[2]) :]
            dense.append(tokens.transpose(1, 2).contiguous())
        return dense[0], dense[1]

    def get_seq_length(self) -> int:
        return self.state.columns + (self.state.query_length if self.done else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = seen = self.state.seen
        gathers = self.mode == GATHERED or (self.mode == UNDECIDED and seen > 0)  # the first forward did not page it
        if gathers and self.sliding_window is not None:
            kept = min(seen, self.sliding_window - 1)
        return kept + query_length, seen - kept

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        self.record_past = True

    # The rows belong to all layers: PagedCache moves them once for all.
    def reset(self) -> None: ...
    def offload(self) -> None: ...
    def prefetch(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def reorder_cache(self, beam_idx: Tensor) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def batch_select_indices(self, indices: Tensor) -> None: ...


def _tokens(states: Tensor) -> Tensor:
    """[B, H, L, D] as [B*L, H, D]."""
    return states.transpose(1, 2).flatten(0, 1)


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with a recurrent or convolutional state, which is the library's, beside attention."""

    is_compileable = False

    def __init__(self, sliding_window: int | None = None, number_of_states: int = 1, **kwargs: Any) -> None:
        PagedLayer.__init__(self, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:
            PagedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)
