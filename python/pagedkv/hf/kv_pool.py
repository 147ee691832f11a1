"""The blocks that a model's caches share: one manager, and each layer's tensors, allocated at its first write."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..block_table import BlockTable
from ..cache import LayerSpec, PagedKVCache
from ..manager import GroupSpec, KVCacheManager
from .pool_size import blocks_for, check_fits, check_settings
from .tags import TAG, MaskTag

Window = int | None


class Pool:
    """Blocks for the attention layers of one model, shared by its caches.

    Layers form groups of about equal size (:func:`pagedkv.group_layers`), each of one window and with a block table of
    its own. The i-th layers of all groups share one pair of tensors where their shapes agree, so that nothing is
    reserved twice. Tensors follow the layer's device and type.

    Args:
        num_blocks: blocks, the null block included.
        block_size: tokens per block.
        windows: the window of each group in tokens, the token itself included; None: unlimited.
        max_length: tokens that the block tables are made wide enough for; they grow when a sequence passes it.
        kv_dtype: type of the stored keys and values, as in :func:`pagedkv.patch`; None: the type they come in.
        prefix_caching: keep full blocks for later prompts that begin with the same tokens.
        watermark, num_host_blocks: of the :class:`pagedkv.KVCacheManager`.

    Attributes:
        manager: the :class:`pagedkv.KVCacheManager` behind it.
        peak_used_blocks: the most blocks that were in use at once.
        layer_modes: of a patched model, see :func:`pagedkv.layer_modes`; empty for any other pool.

    Example:
        >>> pool = pagedkv.hf.Pool(num_blocks=64, block_size=16)
        >>> first, second = (pagedkv.PagedCache(model.config, pool=pool) for _ in range(2))
        >>> pool.manager.num_free_blocks
        63
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[Window] = (None,),
        *,
        max_length: int = 2048,
        kv_dtype: torch.dtype | str | None = None,
        prefix_caching: bool = False,
        watermark: float = 0.0,
        num_host_blocks: int = 0,
    ) -> None:
        self.kv_dtype = check_settings(block_size, num_blocks, None, kv_dtype)[2]
        groups = [GroupSpec() if window is None else GroupSpec("sliding", window) for window in windows]
        self._new_manager = partial(
            KVCacheManager,
            num_blocks,
            block_size,
            enable_prefix_caching=prefix_caching,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
            groups=groups,
        )
        self.manager = self._new_manager()
        self.num_blocks = self.manager.pool.num_blocks
        self.block_size = self.manager.block_size
        self.windows = list(windows)
        self.prefix_caching = prefix_caching
        self.num_host_blocks = num_host_blocks
        self.table_width = max(1, min(self.num_blocks - 1, -(-max_length // self.block_size)))
        self.peak_used_blocks = 0
        self.layer_modes: list[str] = []
        self.new_seq_id = itertools.count().__next__
        self._stores: dict[tuple[int, LayerSpec], PagedKVCache] = {}
        self._static: dict[tuple[int, int, int, torch.device], BlockTable] = {}
        self._markers: dict[tuple[Window, torch.device], Tensor] = {}
        self._owners: dict[tuple[int, int, int, torch.device], object] = {}

    def __repr__(self) -> str:
        parts = [
            f"{self.used_blocks} of {self.num_blocks - 1} blocks of {self.block_size} tokens used",
            f"windows {self.windows}",
        ]
        if self.block_bytes:  # known from the first forward on
            parts.insert(1, f"{self.used_bytes} of {self.num_blocks * self.block_bytes} bytes")
        if self.layer_modes:
            counts = Counter(self.layer_modes)
            parts.append("layers " + " + ".join(f"{count} {mode}" for mode, count in counts.items()))
        return f"Pool({', '.join(parts)})"

    def store(self, row: int, spec: LayerSpec) -> PagedKVCache:
        """The tensors of a group's ``row``-th layer; those of other groups with this spec get the same.

        Raises:
            InvalidArgumentError: the blocks of all layers so far are more than the layer's device has.
        """
        store = self._stores.get((row, spec))
        if store is None:
            block_bytes = self.block_bytes + spec.bytes_per_token() * self.block_size
            check_fits(f"num_blocks={self.num_blocks}", self.num_blocks, block_bytes, torch.device(spec.device))
            store = self._stores[row, spec] = PagedKVCache(
                self.num_blocks, self.block_size, [spec], num_host_blocks=self.num_host_blocks
            )
            for tensor in (store.key_caches[0], store.value_caches[0], *store.read_scales[0].values()):
                # stands where a window has passed: gathered and masked, so it must not hold NaN
                tensor[0].zero_()
                torch._dynamo.mark_static_address(tensor)
        return store

    def renew(self) -> None:
        """Let the manager begin anew, with no sequence and no prefix, after an interrupt in the middle of a change."""
        vars(self.manager).update(vars(self._new_manager()))

    def apply_moves(self) -> None:
        """Bring the blocks that are written or read next, in every layer: swaps, and copies of what was shared."""
        swaps, copies = self.manager.take_swaps(), self.manager.take_copies()
        if copies or swaps[0] or swaps[1]:
            for store in self._stores.values():
                store.apply(swaps, copies)

    def warm_up(self) -> None:
        """Let copies of blocks be compiled where they are kernels: the null block is copied onto itself."""
        for store in self._stores.values():
            store.copy([(0, 0)])

    def static(self, group: int, batch: int, device: torch.device, owner: object) -> tuple[BlockTable, bool]:
        """The buffers of every decode step of this batch size, so that compiled graphs see the same tensors.

        Also whether they hold another owner's rows still.
        """
        key = (group, batch, self.table_width, device)
        table = self._static.get(key)
        if table is None:
            table = self._static[key] = BlockTable(batch, self.table_width, batch, self.block_size, device=device)
            if device.type == "cuda":  # for CUDA graphs; on CPU freezing would take them for constants
                for tensor in table.tensors.values():
                    torch._dynamo.mark_static_address(tensor)
        is_new = self._owners.get(key) is not owner
        self._owners[key] = owner
        return table, is_new

    def marker(self, window: Window, device: torch.device) -> Tensor:
        """The [1, 1, 1, 1] mask that stands for a causal one with this window."""
        marker = self._markers.get((window, device))
        if marker is None:
            marker = self._markers[window, device] = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
            setattr(marker, TAG, MaskTag(window))
        return marker

    def fit_tables(self, num_blocks: int) -> None:
        """Widen the block tables for a sequence of ``num_blocks``."""
        if num_blocks > self.table_width:
            self.table_width = max(2 * self.table_width, num_blocks)

    def note_use(self) -> None:
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks that a sequence holds now."""
        return self.num_blocks - 1 - self.manager.num_free_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; 0 before the first forward."""
        return sum(store.block_bytes for store in self._stores.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of KV memory that sequences hold now."""
        return self.used_blocks * self.block_bytes


def sized(
    pool: Pool,
    num_blocks: int | None,
    memory: int | float | None,
    block_size: int,
    device: torch.device,
    num_host_blocks: int = 0,
) -> int:
    """Blocks that this process has room for.

    Args:
        pool: one that has been written to: it knows what a token takes.
        num_blocks, memory, block_size, num_host_blocks: of the pool to be made.
        device: of the model.

    Raises:
        InvalidArgumentError: names the setting that asks for more than there is.
    """
    block_bytes = pool.block_bytes // pool.block_size * block_size
    check_fits(f"num_host_blocks={num_host_blocks}", num_host_blocks, block_bytes, torch.device("cpu"))
    check_fits(f"block_size={block_size}", 2, block_bytes, device)
    if num_blocks is None:
        return blocks_for(block_bytes, memory, device)
    check_fits(f"num_blocks={num_blocks}", num_blocks, block_bytes, device)
    return num_blocks
