"""``swap_blocks``: between host and device, for pinned blocks of the same layout directly. Others go through two pinned
buffers, the copies on a stream of their own.

While one buffer is on its way the host fills or empties the other. What goes to the device need not wait for the work
that the current stream still has, only its scatter into the cache does; two buffers bound the memory on both sides.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import checks, value_checks
from . import launch
from .blocks import INTEGER

_STAGE_BYTES = 16 << 20  # of a buffer: long enough to reach full PCIe speed, short enough to overlap


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Ordered with the current stream of the device; returns to the host with a CPU destination complete. A pinned
    source may be read until that stream has come so far."""
    checks.check_swap_blocks(src, dst, block_mapping)
    value_checks.check_places("swap_blocks", "dst", dst)
    value_checks.check_block_mapping("swap_blocks", block_mapping, src.size(0), dst.size(0))  # it lives on the CPU
    if launch.capturing():
        raise RuntimeError(
            "swap_blocks: the current stream must not be capturing a CUDA graph, as a replay would leave out what the "
            "host does; got one under capture"
        )
    if block_mapping.size(0) == 0 or src.numel() == 0:
        return
    src, dst = (cache.view(INTEGER[cache.element_size()]) for cache in (src, dst))
    from_ids, to_ids = block_mapping.long().unbind(1)
    if _is_direct(src, dst):
        _copy(src, dst, from_ids, to_ids)
    elif src.device.type == "cpu":
        _to_device(src, dst, from_ids, to_ids)
    elif dst.device.type == "cpu":
        _to_host(src, dst, from_ids, to_ids)
    else:
        dst[to_ids.to(dst.device)] = src[from_ids.to(src.device)].to(dst.device)


def _is_direct(src: Tensor, dst: Tensor) -> bool:
    """Whether runs of blocks are copied without a buffer: one side is pinned, and both have blocks without gaps in the
    same order of elements."""
    if src.device.type == dst.device.type or src.stride() != dst.stride():
        return False
    host = src if src.device.type == "cpu" else dst
    return host.is_pinned() and host.stride(0) == host[0].numel() and launch.reach(host) == host.nbytes


def _copy(src: Tensor, dst: Tensor, from_ids: Tensor, to_ids: Tensor) -> None:
    """In the current stream; one copy for neighbours that come to be neighbours."""
    device = (dst if src.device.type == "cpu" else src).device
    breaks = ((from_ids.diff() != 1) | (to_ids.diff() != 1)).nonzero()[:, 0] + 1
    starts = [0, *breaks.tolist()]
    with torch.cuda.device(device):
        for start, stop in zip(starts, [*starts[1:], len(from_ids)], strict=True):
            first, place, count = int(from_ids[start]), int(to_ids[start]), stop - start
            dst[place : place + count].copy_(src[first : first + count], non_blocking=True)
        if dst.device.type == "cpu":
            torch.cuda.current_stream(device).record_event().synchronize()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _stages(cache: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of ``count`` blocks, each with a pinned buffer that the part before the last one used."""
    block_bytes = cache.numel() // cache.size(0) * cache.element_size()
    step = max(1, min(_STAGE_BYTES // block_bytes, count))
    sizes = (step, *cache.shape[1:])
    buffers = [torch.empty(sizes, dtype=cache.dtype, pin_memory=True) for _ in range(min(2, -(-count // step)))]
    for i, start in enumerate(range(0, count, step)):
        stop = min(start + step, count)
        yield slice(start, stop), buffers[i % 2][: stop - start]


def _on_device(ids: Tensor, device: torch.device) -> Tensor:
    return ids.contiguous().pin_memory().to(device, non_blocking=True)


def _to_device(src: Tensor, dst: Tensor, from_ids: Tensor, to_ids: Tensor) -> None:
    with torch.cuda.device_of(dst):
        current, copies = torch.cuda.current_stream(dst.device), _copy_stream(dst.device)
        to_ids = _on_device(to_ids, dst.device)
        scattered: deque[torch.cuda.Event] = deque()
        for part, buffer in _stages(src, len(from_ids)):
            if len(scattered) == 2:
                scattered.popleft().synchronize()  # the buffer's last content is in the cache
            torch.index_select(src, 0, from_ids[part], out=buffer)
            with torch.cuda.stream(copies):
                arriving = buffer.to(dst.device, non_blocking=True)
            current.wait_event(copies.record_event())
            arriving.record_stream(current)
            dst.index_copy_(0, to_ids[part], arriving)
            scattered.append(current.record_event())


def _to_host(src: Tensor, dst: Tensor, from_ids: Tensor, to_ids: Tensor) -> None:
    in_flight: deque[tuple[torch.cuda.Event, slice, Tensor]] = deque()

    def scatter() -> None:
        arrived, part, buffer = in_flight.popleft()
        arrived.synchronize()
        dst.index_copy_(0, to_ids[part], buffer)

    with torch.cuda.device_of(src):
        current, copies = torch.cuda.current_stream(src.device), _copy_stream(src.device)
        from_ids = _on_device(from_ids, src.device)
        for part, buffer in _stages(src, len(to_ids)):
            leaving = src.index_select(0, from_ids[part])
            copies.wait_event(current.record_event())
            if len(in_flight) == 2:
                scatter()
            with torch.cuda.stream(copies):
                buffer.copy_(leaving, non_blocking=True)
            leaving.record_stream(copies)
            in_flight.append((copies.record_event(), part, buffer))
        while in_flight:
            scatter()
