"""swap_blocks with the CPU in the device's part: the bytes, and the order of copies, waits and uses of the buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pagedkv_ops import reference

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

from pagedkv_ops import _triton
from pagedkv_ops._triton import swapping

Log = list[str]


class Event:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def record_event(self) -> Event:
        self.events += 1
        self.log.append(f"{self.name} records {self.events}")
        return Event(self.log, f"{self.name} {self.events}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Device(TorchFunctionMode):
    """Logs what is called on tensors, with the stream that is current then."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.current, self.copies = Stream(log, "current"), Stream(log, "copies")
        self.active = self.current
        self.entered: list[Any] = []  # tensors and devices whose device was made the current one
        self.is_inside = False

    @contextmanager
    def enter(self, what: Any) -> Iterator[None]:
        self.entered.append(what)
        self.is_inside = True
        yield
        self.is_inside = False

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.active = stream
        yield
        self.active = self.current

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            return args[0]
        if kwargs.pop("pin_memory", False):
            self.log.append("buffer")
        if function in (torch.index_select, Tensor.index_select, Tensor.index_copy_, Tensor.to, Tensor.copy_):
            assert self.is_inside, "another device may be current"
        if function in (torch.index_select, Tensor.index_select):
            self.log.append("host gathers" if "out" in kwargs else f"{self.active.name} gathers")
        elif function is Tensor.index_copy_:
            self.log.append(f"{self.active.name} scatters")
        elif function in (Tensor.to, Tensor.copy_):
            assert kwargs.get("non_blocking"), "a copy that waits for the stream"
            self.log.append(f"{self.active.name} copies")
            if function is Tensor.to:  # on a device always another tensor
                return args[0].clone()
        return function(*args, **kwargs)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device([])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "device_of", device.enter)
    monkeypatch.setattr(torch.cuda, "device", device.enter)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: device.log.append(f"kept for {stream.name}"))
    monkeypatch.setattr(swapping, "_copy_stream", lambda _: device.copies)
    monkeypatch.setattr(swapping, "_STAGE_BYTES", 24)  # two blocks
    return device


def swap(device: Device, direction: str) -> Log:
    """Five blocks in stages of two; the log."""
    src = torch.randint(-9, 9, (6, 2, 3), dtype=torch.int16)
    dst = torch.full((8, 3, 2), 99, dtype=torch.int16).transpose(1, 2)
    mapping = torch.tensor([[0, 7], [3, 1], [3, 2], [5, 0], [1, 6]])
    expected = dst.clone()
    reference.swap_blocks(src, expected, mapping)
    with device:
        getattr(swapping, direction)(src, dst, *mapping.unbind(1))
    assert torch.equal(dst, expected)
    [entered] = device.entered
    assert entered is (dst if direction == "_to_device" else src)
    return device.log


def test_to_the_device(device: Device) -> None:
    """No copy waits for the current stream, every scatter for its copy, and a buffer is filled when it is free."""
    stages = [
        [
            "host gathers",
            "copies copies",
            f"copies records {i}",
            f"current waits for copies {i}",
            "kept for current",
            "current scatters",
            f"current records {i}",
        ]
        for i in (1, 2, 3)
    ]
    start = ["current copies", "buffer", "buffer"]
    assert swap(device, "_to_device") == [*start, *stages[0], *stages[1], "host waits for current 1", *stages[2]]


def test_to_the_host(device: Device) -> None:
    """Every copy waits for its gather, and a buffer is emptied before it is filled again."""

    def leaving(i: int, *emptied: str) -> list[str]:
        gathered = ["current gathers", f"current records {i}", f"copies waits for current {i}"]
        return [*gathered, *emptied, "copies copies", "kept for copies", f"copies records {i}"]

    def emptied(i: int) -> list[str]:
        return [f"host waits for copies {i}", "current scatters"]

    start = ["current copies", "buffer", "buffer"]
    assert swap(device, "_to_host") == [
        *start,
        *leaving(1),
        *leaving(2),
        *leaving(3, *emptied(1)),
        *emptied(2),
        *emptied(3),
    ]


def test_pinned_blocks_of_the_same_layout_need_no_buffer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are one copy each, and only what the host reads is waited for."""
    src = torch.randint(-9, 9, (8, 3, 2), dtype=torch.int16).transpose(1, 2)
    dst = torch.zeros(9, 3, 2, dtype=torch.int16).transpose(1, 2)
    mapping = torch.tensor([[2, 4], [3, 5], [4, 6], [5, 1], [7, 2]])
    expected = dst.clone()
    reference.swap_blocks(src, expected, mapping)
    with device:
        swapping._copy(src, dst, *mapping.unbind(1))
        assert device.log == ["current copies"] * 3 + ["current records 1", "host waits for current 1"]
        device.log.clear()
        swapping._copy(src, torch.empty(9, 2, 3, dtype=torch.int16, device="meta"), *mapping.unbind(1))
    assert device.log == ["current copies"] * 3
    assert device.entered == [torch.device("cpu"), torch.device("meta")]
    assert torch.equal(dst, expected)
    there = torch.empty(8, 3, 2, dtype=torch.int16, device="meta")
    gaps = torch.zeros(8, 4, 2, dtype=torch.int16)[:, :3]
    for is_pinned in (True, False):
        monkeypatch.setattr(Tensor, "is_pinned", lambda _, is_pinned=is_pinned: is_pinned)
        pairs = (src, there.transpose(1, 2)), (there.transpose(1, 2), src), (src, there), (gaps, there), (src, dst)
        assert [swapping._is_direct(*pair) for pair in pairs] == [is_pinned, is_pinned, False, False, False]


def test_a_captured_swap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    src, dst = torch.ones(3, 2), torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="swap_blocks: the current stream must not be capturing a CUDA graph"):
        _triton.swap_blocks(src, dst, torch.tensor([[0, 1]]))
    assert not dst.any()
