"""Which tile sizes, warps and split counts a launch uses: from shapes and the architecture alone, nothing is timed."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..arguments import Attention
from . import shares
from .quantised import FORMATS, compute_dtype
from .tuned import TABLE

MAX_POSITION = 2**30  # positions are int32 in the kernel, to which a window is added
MAX_SPLITS = 128
MIN_SPLIT_KEYS = 256  # below it, the second pass costs more than the split gains
# Sequences whose lengths a program sees at once, in registers. More are not split: in 4,096 a row of 128k keys among
# others of 4k has 1/128 of the work, and a program for each of 8 heads is many waves of any device.
_SHARING = (32, 256, 1024, 4096)
_SHORTEST_BOX = 16  # slots: shorter ones cost more instructions than the loads that they save
_SHARED_KB = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "small": 100}  # of a multiprocessor


class Config(NamedTuple):
    block_m: int  # for decode the most; fewer where a token's group of heads is smaller
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
    boxed: bool = False  # keys and values are loaded by descriptors, where these fit


class Plan(NamedTuple):
    grid: tuple[int, int, int]  # query tiles or shares of the keys, tiles of heads, splits
    capacity: int  # W * S
    num_splits: int
    sizes: dict[str, Any]  # fields of the kernel's Spec
    options: dict[str, int]  # warps and stages
    blocks_per_sm: int  # that run at once, where the compiled kernel is not there to tell


@functools.cache
def _device(index: int) -> tuple[str, int]:
    """The table's name of an architecture and the number of its multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if torch.version.hip or capability < (8, 0):
        kind = f"AMD {properties.gcnArchName}" if torch.version.hip else "compute capability {}.{}".format(*capability)
        raise NotImplementedError(
            f"pagedkv attention needs an NVIDIA GPU of compute capability 8.0 or higher, got {kind} ({properties.name})"
        )
    name = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(capability, "small")
    return name, properties.multi_processor_count


def device(tensor: Tensor) -> tuple[str, int]:
    if tensor.is_cuda:
        return _device(tensor.get_device())
    return "sm_80", 108  # Triton's interpreter


def padded(size: int) -> int:
    """Tile width for a head size: matrix instructions want at least 16, tiles a power of two."""
    return max(16, triton.next_power_of_2(size))


def attention_config(
    arch: str, num_tokens: int, batch: int, group: int, head_size: int, itemsize: int, invariant: bool
) -> Config:
    """The row of the table for these shapes. ``invariant``: the same row whatever the number of tokens is."""
    width = max(64, padded(head_size))
    few_rows = num_tokens <= batch or num_tokens * group <= 32 * batch
    kind = "decode" if few_rows or invariant or (arch, "prefill", itemsize, width) not in TABLE else "prefill"
    config = Config(*TABLE[arch, kind, itemsize, width])
    if kind == "decode":  # rows for one token's group of heads, or for a few tokens of each sequence
        rows = group if num_tokens <= batch or invariant else 32
        config = config._replace(block_m=min(max(16, triton.next_power_of_2(rows)), config.block_m))
    return config


def resident(arch: str, num_sms: int, registers: int, shared: int, num_warps: int) -> int:
    """Thread blocks of a compiled kernel that a device runs at once."""
    per_warp = triton.cdiv(max(registers, 1) * 32, 256) * 256  # registers are handed out 256 at a time
    of_threads = (48 if arch == "small" else 64) // num_warps
    of_memory = _SHARED_KB[arch] * 1024 // (shared + 1024)
    return num_sms * max(1, min(65536 // per_warp // num_warps, of_threads, of_memory))


def splits_of(programs: int, capacity: int, target: int) -> int:
    """Splits of the keys, for ``programs`` thread blocks without any, so that about ``target`` of them run."""
    most = min(MAX_SPLITS, triton.cdiv(capacity, MIN_SPLIT_KEYS))
    return max(1, min(triton.cdiv(target, max(programs, 1)), most))


def plans(a: Attention) -> list[Plan]:
    """Of the launches of one call; where they write the same rows, the last is right.

    Decode rows beside chunks have a launch of their own. A split count of the caller's is the same for all rows.
    """
    if a.cu_seqlens_q is None or a.num_splits != 0 or a.block_table.size(0) == 1:
        return [_plan(a, shares.ALL_ROWS.value)]
    return [_plan(a, shares.CHUNKS.value), _plan(a, shares.DECODE_ROWS.value)]


def with_programs(plan: Plan, blocks: int) -> Plan:
    """The plan with as many programs as fill the device, on which ``blocks`` of them run at once, in whole waves."""
    rows, grid_heads, _ = plan.grid
    if plan.sizes["SHARES"]:  # at least two for each row, so that long ones can have more than short ones
        waves = triton.cdiv(2 * rows * grid_heads, blocks)
        most = rows * min(MAX_SPLITS, triton.cdiv(plan.capacity, MIN_SPLIT_KEYS))
        return plan._replace(grid=(max(min(waves * blocks // grid_heads, most), rows), grid_heads, 1))
    if plan.num_splits == 0:
        num_splits = splits_of(rows * grid_heads, plan.capacity, blocks)
        plan = plan._replace(num_splits=num_splits, grid=(rows, grid_heads, num_splits))
    split = plan.num_splits > 1
    sizes = plan.sizes | {"SPLIT": split, "DEPENDENT": split and plan.sizes["DEPENDENT"]}
    return plan._replace(sizes=sizes)


def _fit_boxes(*caches: Tensor) -> bool:
    """Whether descriptors can name the blocks: addresses and strides are multiples of 16 bytes."""
    steps = [stride * cache.element_size() for cache in caches for stride in cache.stride()[:3]]
    if any(cache.dtype in FORMATS for cache in caches):  # which must be decoded
        return False
    return min(steps) > 0 and all(size % 16 == 0 for size in (*steps, *(cache.data_ptr() for cache in caches)))


def _plan(a: Attention, rows: int) -> Plan:
    """Before it is known how many programs the device runs at once; num_splits 0 is open."""
    num_tokens, num_heads, head_size = a.query.shape
    _, block_size, num_kv_heads, v_head_size = a.value_cache.shape
    batch, table_width = a.block_table.shape
    group = num_heads // num_kv_heads
    arch, _ = device(a.query)
    itemsize = compute_dtype(a.query, a.key_cache).itemsize
    invariant = a.num_splits == 1
    several = a.cu_seqlens_q is not None and rows != shares.DECODE_ROWS.value  # query rows of a sequence
    tokens = num_tokens if several else batch
    tiles = attention_config(arch, tokens, batch, group, max(head_size, v_head_size), itemsize, invariant)
    if a.key_cache.dtype in FORMATS and arch in ("sm_80", "small"):  # e4m3 decoded beside 128 rows spilled
        tiles = tiles._replace(block_m=min(tiles.block_m, 64))
    tile_heads = min(group, tiles.block_m)
    tile_tokens = tiles.block_m // tile_heads if several else 1
    num_tiles = num_tokens // tile_tokens + batch + 1 if several else batch
    grid_heads = num_kv_heads * triton.cdiv(group, tile_heads)
    capacity = min(table_width * block_size, MAX_POSITION)
    shared = not several and a.num_splits == 0 and batch <= _SHARING[-1] and capacity > MIN_SPLIT_KEYS
    block_d = padded(head_size)
    sizes = {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "D": head_size,
        "DV": v_head_size,
        "SPLIT": shared or a.num_splits > 1,
        "ROWS": rows,
        "SHARES": next(size for size in _SHARING if batch <= size) if shared else 0,
        "MIN_TILES": MIN_SPLIT_KEYS // tiles.block_n if shared else 0,
        "MAX_SPLITS": MAX_SPLITS if shared else 0,
        "DEPENDENT": arch in ("sm_90", "sm_100"),
        "ONE_LOOP": invariant,
        "RELOAD": itemsize == 4 and block_d >= 128 and tiles.block_m * block_d >= 4096,
        "SLOTS": (slots := math.gcd(tiles.block_n, block_size)),
        "BOXED": tiles.boxed and slots >= _SHORTEST_BOX and _fit_boxes(a.key_cache, a.value_cache),
        "HEAD_TILES": triton.cdiv(group, tile_heads),
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": padded(v_head_size),
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    num_splits = min(a.num_splits, MAX_SPLITS) if not shared else MAX_SPLITS
    return Plan((num_tiles, grid_heads, max(num_splits, 1)), capacity, num_splits, sizes, options, tiles.blocks_per_sm)


def check_head_size(op: str, a: Attention) -> None:
    """Tiles hold whole heads in shared memory and registers of a device that is served."""
    device(a.query)
    compute = compute_dtype(a.query, a.key_cache)
    most = 256 if compute == torch.float32 else 1024
    for name, cache in (("key_cache", a.key_cache), ("value_cache", a.value_cache)):
        if cache.size(3) > most:
            kind = f"with {str(compute).removeprefix('torch.')} products on CUDA"
            raise RuntimeError(f"{op}: {name}.size(3) must be at most {most} {kind}, got {cache.size(3)}")
