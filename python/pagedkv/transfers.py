"""Between host and device without waiting: through pinned memory, and on the device that is meant."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """Whether tensors on it are read and written where they are."""
    return device.type == "cpu"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a CUDA device is the current one: copies, events, launches and captures are made on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(values: Any, device: torch.device) -> Tensor:
    """Integers as a tensor."""
    if is_host(device):
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors on the host, after one wait for all of them."""
    if is_host(tensors[0].device):
        return tensors
    host = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
    torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return host


class Staging:
    """Words of 32 bits on the host, and the same on a device, each array from a multiple of 16 bytes on.

    On CPU both are the same memory. The host side is pinned for CUDA, so that no copy waits.

    Args:
        sizes: words of each array.

    Attributes:
        host, sent: the arrays, here and on the device.
    """

    def __init__(self, device: torch.device, *sizes: int) -> None:
        self.device = device
        self.is_copied, on_cuda = not is_host(device), device.type == "cuda"
        padded = [-(-size // 4) * 4 for size in sizes]
        with torch.inference_mode(False):  # inference tensors could not be written under plain no_grad
            host = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=on_cuda)
            sent = torch.zeros_like(host, device=device) if self.is_copied else host
            self.host, self.sent = (
                [part[:size] for part, size in zip(torch.split(words, padded), sizes, strict=True)]
                for words in (host, sent)
            )
        self._all = host, sent
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._in_flight = False

    def send(self, last: int, count: int) -> None:
        """Copy the arrays before the `last`-th, and so many words of that one; to be called on the device."""
        host, sent = self._all
        stop = self.host[last].storage_offset() + count
        sent[:stop].copy_(host[:stop], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._in_flight = True

    def wait(self) -> None:
        """Host memory may not change while a copy still reads it."""
        if self._in_flight and self._copied is not None:
            self._copied.synchronize()
            self._in_flight = False
