"""Tensors in memory of our own: ending at a page that no one may touch, or spread over gigabytes of unused memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, length: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), 0):  # PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect")


def _mapped(num_bytes: int) -> Tensor:
    """uint8 zeros; pages come into being as they are written. The mapping lives as long as the tensor."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one that the view touches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def guarded(tensor: Tensor, *, at_start: bool = False) -> Tensor:
    """A copy with the same strides whose last element ends (or first one begins) at a page that may not be touched."""
    num_bytes = _span(tensor) * tensor.element_size()
    if num_bytes == 0:
        return tensor
    room = -(-num_bytes // PAGE) * PAGE
    memory = _mapped(room + 2 * PAGE)
    _protect(memory.data_ptr(), PAGE)
    _protect(memory.data_ptr() + PAGE + room, PAGE)
    start = PAGE if at_start else PAGE + room - num_bytes
    elements = memory[start : start + num_bytes].view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), elements.storage_offset()).copy_(tensor)


def sparse(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose strides may reach far past the machine's memory."""
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return _mapped(num_elements * dtype.itemsize).view(dtype).as_strided(sizes, strides)
