"""The tensors behind block ids: one key and one value tensor per layer, all with the same numbering of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import pagedkv_ops
from pagedkv.errors import integer, listed, refused
from pagedkv.manager.blocks import MAX_BLOCKS
from pagedkv.manager.groups import MAX_BLOCK_SIZE
from pagedkv.manager.moves import BlockPairs
from pagedkv.transfers import to_device

QUANTISED = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def storage_type(setting: str, value: Any) -> torch.dtype:
    """A type that blocks can hold, by its torch name or that of :data:`QUANTISED`.

    Raises:
        InvalidArgumentError: for any other; names the setting.
    """
    dtype = QUANTISED.get(value, value) if isinstance(value, str) else value
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, *QUANTISED.values()):
        names = "torch.float32, torch.float16, torch.bfloat16, 'int8', 'fp8_e4m3' or 'fp8_e5m2'"
        raise refused(setting, names, value)
    return dtype


@dataclass(frozen=True)
class LayerSpec:
    """What an attention layer stores per token: ``num_kv_heads`` keys of ``head_size``, values of ``v_head_size``.

    Args:
        num_kv_heads: heads of keys and of values.
        head_size: elements of a key.
        v_head_size: elements of a value; None: as of a key.
        dtype: of what is stored; of the quantised ones also by name: "int8", "fp8_e4m3", "fp8_e5m2". These have a
            float32 scale for each token's key and value of each head.
        device: of the blocks.

    Example:
        >>> LayerSpec(num_kv_heads=8, head_size=128, dtype=torch.bfloat16).bytes_per_token()
        4096
        >>> LayerSpec(num_kv_heads=8, head_size=128, dtype="int8").bytes_per_token()
        2112
    """

    num_kv_heads: int
    head_size: int
    v_head_size: int | None = None
    dtype: Any = torch.float32  # a torch.dtype once constructed
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", storage_type("LayerSpec.dtype", self.dtype))

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED.values()

    def bytes_per_token(self) -> int:
        elements = self.head_size + (self.v_head_size or self.head_size)
        scales = 2 * torch.float32.itemsize if self.is_quantised else 0
        return self.num_kv_heads * (elements * int(self.dtype.itemsize) + scales)


class PagedKVCache:
    """Key and value tensors [num_blocks, block_size, num_kv_heads, head_size] for every layer.

    Each layer has separate storages for K and V: compiled graphs then need no clone of a cache. Memory is stored head
    by head inside a block (``layout="HND"``, a transposed view of [num_blocks, num_kv_heads, block_size, head_size]),
    so that the CPU kernels stream each head's rows; ``layout="NHD"`` stores it token by token. On CPU, pages of memory
    are touched only as blocks are used. Quantised layers have scales, head by head in either layout: those that a write
    fills are what attention reads.

    Args:
        num_blocks: blocks per layer, the null block 0 included.
        block_size: tokens per block.
        layers: one :class:`LayerSpec` per attention layer.
        groups: lists of layer indices, for a manager with groups: the i-th layers of all groups share one pair of
            tensors, so they must have equal specs. Default: every layer has its own.
        num_host_blocks: blocks of a host pool for :meth:`swap`, pinned when a layer is on CUDA; allocated on first use.

    Attributes:
        key_caches, value_caches: per layer, the logical [num_blocks, block_size, num_kv_heads, head_size] views.
        write_scales: per layer the keyword arguments of ``write_kv`` and ``paged_attention_append`` that name its
            scales; empty unless it is quantised.
        read_scales: likewise of ``paged_attention``.

    Raises:
        InvalidArgumentError: a size or a type that is not accepted, an unknown layout, groups that do not name each
            layer once or pair unequal layers.

    Example:
        >>> cache = PagedKVCache(num_blocks=8, block_size=16, layers=[LayerSpec(2, 64)] * 3)
        >>> len(cache.key_caches), list(cache.key_caches[0].shape), cache.block_bytes
        (3, [8, 16, 2, 64], 49152)
        >>> small = PagedKVCache(num_blocks=8, block_size=16, layers=[LayerSpec(2, 64, dtype="int8")])
        >>> token = torch.ones(1, 2, 64)
        >>> caches, slot = (small.key_caches[0], small.value_caches[0]), torch.tensor([16])
        >>> pagedkv_ops.write_kv(token, token, *caches, slot, **small.write_scales[0])
        >>> table, length = torch.tensor([[1]]), torch.tensor([1])
        >>> pagedkv_ops.paged_attention(token, *caches, table, length, **small.read_scales[0]).mean()
        tensor(1.)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerSpec],
        *,
        groups: Sequence[Sequence[int]] | None = None,
        layout: str = "HND",
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 2, " (one is the null block)", maximum=MAX_BLOCKS)
        self.block_size = integer("block_size", block_size, 1, maximum=MAX_BLOCK_SIZE)
        self.num_host_blocks = integer("num_host_blocks", num_host_blocks, 0, maximum=MAX_BLOCKS)
        if layout not in ("HND", "NHD"):
            raise refused("layout", "'HND' or 'NHD'", layout)
        self.layout = layout
        self.layers: list[LayerSpec] = listed("layers", layers, "a sequence of LayerSpecs")
        _check_layers(self.layers)
        self._storage = _storage_plan(self.layers, groups)
        stored = [self._allocate(self.num_blocks, self.layers[plan[0]]) for plan in self._storage]
        self.key_caches: list[Tensor] = [torch.empty(0)] * len(self.layers)
        self.value_caches: list[Tensor] = [torch.empty(0)] * len(self.layers)
        self.write_scales: list[dict[str, Tensor]] = [{}] * len(self.layers)
        self.read_scales: list[dict[str, Tensor]] = [{}] * len(self.layers)
        for plan, (key_cache, value_cache, *scales) in zip(self._storage, stored, strict=True):
            for layer in plan:
                self.key_caches[layer], self.value_caches[layer] = key_cache, value_cache
                self.write_scales[layer] = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=False))
                self.read_scales[layer] = dict(zip(("k_scale", "v_scale"), scales, strict=False))
        self._tensors = [tensor for tensors in stored for tensor in tensors]
        self._host: list[Tensor] | None = None

    def _allocate(self, num_blocks: int, spec: LayerSpec, pin_memory: bool = False) -> list[Tensor]:
        """Keys and values of one layer, and their scales if they are quantised."""
        options: dict[str, Any] = {"device": spec.device, "pin_memory": pin_memory}
        tokens, by_head = (self.block_size, spec.num_kv_heads), (spec.num_kv_heads, self.block_size)
        # an inference tensor could not be written under plain no_grad later
        with torch.inference_mode(False):
            sizes = [num_blocks, *(by_head if self.layout == "HND" else tokens)]
            caches = [
                torch.empty(*sizes, head_size, dtype=spec.dtype, **options)
                for head_size in (spec.head_size, spec.v_head_size or spec.head_size)
            ]
            if self.layout == "HND":
                caches = [cache.transpose(1, 2) for cache in caches]
            if spec.is_quantised:
                caches += [torch.empty(num_blocks, *by_head, **options).transpose(1, 2) for _ in caches]
        return caches

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes reserved on the layers' devices."""
        return self.num_blocks * self.block_bytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Apply ``manager.take_copies()``: (source, destination) blocks, in every layer; one op call per device.

        Raises:
            RuntimeError: an id out of range or a destination twice (CPU); nothing is copied then.
        """
        if not pairs:
            return
        for device in dict.fromkeys(tensor.device for tensor in self._tensors):
            pagedkv_ops.copy_blocks([t for t in self._tensors if t.device == device], to_device(pairs, device))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host pool, in every layer.

        Raises:
            RuntimeError: an id out of range.
        """
        self._swap(pairs, to_host=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs back from the host pool, in every layer.

        Raises:
            RuntimeError: an id out of range.
        """
        self._swap(pairs, to_host=False)

    def apply(self, swaps: tuple[BlockPairs, BlockPairs], copies: BlockPairs) -> None:
        """Apply a step's pending block moves in the order the manager's contract gives: swap-outs, copies, swap-ins."""
        swap_out, swap_in = swaps
        self.swap_out(swap_out)
        self.copy(copies)
        self.swap_in(swap_in)

    def _swap(self, pairs: Sequence[tuple[int, int]], to_host: bool) -> None:
        if not pairs:
            return
        mapping = torch.tensor(pairs, dtype=torch.int64)
        for device_tensor, host_tensor in zip(self._tensors, self._host_tensors(), strict=True):
            src, dst = (device_tensor, host_tensor) if to_host else (host_tensor, device_tensor)
            pagedkv_ops.swap_blocks(src, dst, mapping)

    def _host_tensors(self) -> list[Tensor]:
        if self._host is None:
            specs = [self.layers[plan[0]] for plan in self._storage]
            pin = any(torch.device(spec.device).type == "cuda" for spec in specs)
            host_specs = [replace(spec, device="cpu") for spec in specs]
            self._host = [t for spec in host_specs for t in self._allocate(self.num_host_blocks, spec, pin)]
        return self._host


def _check_layers(layers: list[LayerSpec]) -> None:
    if not layers:
        raise refused("layers", "at least one LayerSpec", layers)
    for i, spec in enumerate(layers):
        if not isinstance(spec, LayerSpec):
            raise refused(f"layers[{i}]", "a LayerSpec", spec)
        for name in ("num_kv_heads", "head_size", "v_head_size"):
            size = getattr(spec, name)
            if size is not None or name != "v_head_size":
                integer(f"layers[{i}].{name}", size, 1)
        storage_type(f"layers[{i}].dtype", spec.dtype)


def _storage_plan(layers: Sequence[LayerSpec], groups: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Layer indices by pair of tensors: the i-th layers of all groups together."""
    if groups is None:
        return [[layer] for layer in range(len(layers))]
    expected = f"lists of indices that name each of {len(layers)} layers once"
    groups = [listed("groups", group, expected) for group in listed("groups", groups, expected)]
    if sorted(integer("groups", layer) for group in groups for layer in group) != list(range(len(layers))):
        raise refused("groups", expected, groups)
    plan: list[list[int]] = []
    for i in range(max(len(group) for group in groups)):
        row = [group[i] for group in groups if i < len(group)]
        if any(layers[layer] != layers[row[0]] for layer in row):
            raise refused("groups", "equal specs of the layers that share tensors", [layers[layer] for layer in row])
        plan.append(row)
    return plan
