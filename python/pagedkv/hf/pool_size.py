"""How many blocks a pool gets when nobody says so, and the most that it can have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..cache import storage_type
from ..errors import InvalidArgumentError, integer, refused
from ..manager.blocks import MAX_BLOCKS

CPU_FRACTION = 0.5  # of the available memory; only reserved: pages are touched as blocks are used
CUDA_FRACTION = 0.8  # of the free memory, after the weights
_LEAST_TOKEN_BYTES = 32  # of a layer: a key and a value of one head of 8 elements of 2 bytes
MAX_DEFAULT_BLOCKS = 65_536  # keeps the manager of a tiny model small


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; on CPU what the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory(device)


def total_memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(memory: Any) -> None:
    """Raise InvalidArgumentError for what can not be the ``memory`` of a pool on any device."""
    is_bytes = isinstance(memory, int) and not isinstance(memory, bool) and memory > 0
    if not is_bytes and not (isinstance(memory, float) and 0 < memory <= 1):
        raise refused("memory", "an int of bytes or a fraction above 0 and up to 1", memory)


def check_settings(
    block_size: Any, num_blocks: Any, memory: Any, kv_dtype: Any
) -> tuple[int, int | None, torch.dtype | None]:
    """Sizes as ints and the type; raises InvalidArgumentError for what can not size or type the blocks of any model."""
    block_size = integer("block_size", block_size, 1)
    if num_blocks is not None:
        num_blocks = integer("num_blocks", num_blocks, 2, " (one is the null block)")
    if memory is not None:
        check_memory(memory)
        if num_blocks is not None:
            raise refused("num_blocks, memory", "one of them", (num_blocks, memory))
    return block_size, num_blocks, None if kv_dtype is None else storage_type("kv_dtype", kv_dtype)


def check_fits(setting: str, num_blocks: int, block_bytes: int, device: torch.device) -> None:
    """Raise InvalidArgumentError where blocks need more than a device has, naming the setting that asks for them."""
    needed, total = num_blocks * block_bytes, total_memory(device)
    if needed > total:
        got = f"{num_blocks} blocks of {block_bytes} bytes, {needed} bytes in all"
        raise InvalidArgumentError(f"{setting}: expected at most the {total} bytes of {device}, got {got}")


def check_any_fits(num_blocks: int, block_size: int, num_layers: int) -> None:
    """Raise InvalidArgumentError for blocks that hold too much for any device here, however small a token is.

    Their number alone costs the manager 100 bytes each, so it must not wait until a forward shows what a token takes.
    """
    integer("num_blocks", num_blocks, maximum=MAX_BLOCKS)
    tokens = min(block_size, 16)  # a larger block is refused by its own name
    devices = [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]
    device = max(devices, key=total_memory)
    check_fits(f"num_blocks={num_blocks}", num_blocks, _LEAST_TOKEN_BYTES * num_layers * tokens, device)


def blocks_for(block_bytes: int, memory: int | float | None, device: torch.device) -> int:
    """Blocks of a pool, the null block included.

    Args:
        block_bytes: bytes of a block over all layers.
        memory: bytes, or a fraction (0..1) of what is free on ``device``; None: on CPU half of what is free, on CUDA
            0.8 of it, at most 65,536 blocks.

    Raises:
        InvalidArgumentError: a memory that holds no block, that the device does not have, or a fraction above 1.
    """
    limit = None
    if memory is None:
        memory = CUDA_FRACTION if device.type == "cuda" else CPU_FRACTION
        limit = MAX_DEFAULT_BLOCKS
    check_memory(memory)
    if isinstance(memory, float):
        memory = int(memory * free_memory(device))
    elif memory > total_memory(device):
        raise refused("memory", f"at most the {total_memory(device)} bytes of {device}", memory)
    num_blocks = memory // block_bytes
    if num_blocks < 2:
        raise refused("memory", f"room for two blocks of {block_bytes} bytes (one is the null block)", memory)
    return num_blocks if limit is None else min(num_blocks, limit)
