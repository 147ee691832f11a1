"""Stands in for a GPU's driver: Triton's own launch path runs up to the launch, which is noted instead of made.

Tensors lie on the CPU. A kernel is not compiled either: its specialisation is all that a launcher decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import _allocation

from pagedkv_ops._triton import append_kernel, attention_kernel, blocks, gathering, shares, splits, states, writing


class Started(NamedTuple):
    """A launch as the driver gets it."""

    kernel: str
    specialisation: tuple[Any, ...]  # signature, constants, attributes and options that the kernel was compiled for
    grid: tuple[int, int, int]
    stream: int
    args: tuple[Any, ...]  # flat; a tensor as its address, as the driver takes it


class _Kernel(CompiledKernel):
    """Without code, so that there is none to unload."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.metadata, self.src, self.name, self.hash, self.kernel = metadata, src, src.fn.__name__, "", b""
        self.packed_metadata, self.metadata_group = (), {}
        self.module = self.function = self._run = None

    def __del__(self) -> None:
        pass


class FakeDriver:
    """What ``JITFunction.run`` and ``CompiledKernel`` use of a driver."""

    def __init__(self, capability: int, registers: int) -> None:
        self.started: list[Started] | None = []  # None: not noted
        self.compiled: list[str] = []
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=lambda *_: (1, 2, registers, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return self.target

    def compile(self, src: Any, target: Any, options: dict[str, Any], **_: Any) -> CompiledKernel:
        self.compiled.append(src.fn.__name__)
        fields = {"num_warps": options["num_warps"], "num_ctas": 1, "warp_size": 32, "shared": 32 << 10}
        boxed = "BOXED=True" in repr(src.constants)
        fields |= {"global_scratch_size": 256 * boxed, "global_scratch_align": 128}
        fields |= {"name": src.fn.__name__, "target": target, "tmem_size": None, "options": options}
        return _Kernel(src, SimpleNamespace(**fields))

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """Of one compiled kernel, called as Triton's own."""
        constants = sorted((str(path), repr(value)) for path, value in src.constants.items())
        options = {name: metadata.options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        options["launch_pdl"] = metadata.options.get("launch_pdl", False)
        specialisation = (repr(src.signature), tuple(constants), repr(src.attrs), tuple(options.items()))

        def start(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            _, launch_metadata, enter, leave, *args = rest
            if metadata.global_scratch_size:  # as Triton's own launcher does
                _allocation._allocator.get()(metadata.global_scratch_size, metadata.global_scratch_align, stream)
            for hook in (enter, leave):
                if hook is not None:
                    hook(launch_metadata)
            if self.started is not None:
                started = Started(src.fn.__name__, specialisation, (x, y, z), stream, tuple(_flat(args)))
                self.started.append(started)

        return start


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value.data_ptr() if isinstance(value, torch.Tensor) else value


def _kernels() -> list[Any]:
    modules = (append_kernel, attention_kernel, blocks, gathering, shares, splits, states, writing)
    return [value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)]


@contextmanager
def installed(capability: int = 90, registers: int = 128) -> Iterator[FakeDriver]:
    """In place of Triton's driver and compiler, with nothing compiled yet."""
    driver = FakeDriver(capability, registers)
    kernels = _kernels()
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        with mock.patch.object(triton.compiler, "compile", driver.compile):
            for kernel in kernels:
                kernel.device_caches.clear()
            yield driver
    finally:
        config._active = before
        for kernel in kernels:
            kernel.device_caches.clear()
