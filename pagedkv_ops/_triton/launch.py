"""What every launcher shares."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Triton 3.10 changes its default; the compile report and the equal bits of num_splits=1 were looked at with fusion
OPTIONS = {"enable_fp_fusion": True}

INTERPRETED = triton.knobs.runtime.interpret


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_recorded: list[Launch] | None = None
_running = threading.local()  # ``trace``: of the call that this thread makes, see ``replay``


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of starting them: for compiling without a device, and for looking at arguments."""
    global _recorded
    _recorded = launches = []
    try:
        yield launches
    finally:
        _recorded = None


def is_aside() -> bool:
    """Whether launches are collected or compiled, instead of started."""
    return _recorded is not None or getattr(_running, "kernels", None) is not None


@contextmanager
def compiling() -> Iterator[set[Any]]:
    """Compile what would be launched in this thread, and collect the kernels."""
    _running.kernels = kernels = set()
    try:
        yield kernels
    finally:
        _running.kernels = None


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _compiling_refused(kernel: Any) -> Iterator[None]:
    """For a capture: it would break at the first load of a kernel, with an error that names neither op nor remedy."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{kernel.__name__}: must be compiled before a CUDA graph is captured, got a first call inside one; "
            "call pagedkv_ops.warm_up, or the op once with such arguments, before it"
        )

    kernel._do_compile = refuse
    try:
        yield
    finally:
        del kernel._do_compile


def with_scratch(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run``, whose launches may ask Triton for memory on the device: descriptors lie there."""

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)  # of the current stream, which is the launch's

    def call(*args: Any, **options: Any) -> Any:
        context = contextvars.copy_context()  # the allocator outside is the user's
        context.run(triton.set_allocator, allocate)
        return context.run(run, *args, **options)

    return call


def _run(kernel: Any, like: Tensor, grid: Any, args: Any, meta: Any, warmup: bool = False) -> Any:
    if INTERPRETED:
        return kernel[grid](*args, **meta)
    with torch.cuda.device_of(like), _compiling_refused(kernel) if capturing() else nullcontext():
        return with_scratch(kernel.run, like.device)(*args, grid=grid, warmup=warmup, **meta)


@contextmanager
def tracing(trace: Any) -> Iterator[None]:
    _running.trace = trace
    try:
        yield
    finally:
        _running.trace = None


def _trace() -> Any:
    return getattr(_running, "trace", None)


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **meta: Any) -> None:
    """Start ``kernel`` on the device of ``like``; an empty grid is no work.

    Grid and arguments must come from shapes and strides: a captured CUDA graph replays them for other lengths, and
    ``replay`` starts them again for other tensors. What they point to are arguments of the op, or made by the functions
    below; in a tuple pointers come first.
    """
    if 0 in grid:
        return
    meta |= OPTIONS
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, meta))
        return
    if (kernels := getattr(_running, "kernels", None)) is not None:
        kernels.add(compiled_for(kernel, like, *args, **meta))
        return
    compiled = _run(kernel, like, grid, args, meta)
    if (trace := _trace()) is not None:
        trace.launched(compiled, Launch(kernel, grid, args, meta))


def compiled_for(kernel: Any, like: Tensor, *args: Any, **meta: Any) -> Any:
    """Triton's compiled kernel for a launch with these arguments, loaded; None where no device is there to load it."""
    if INTERPRETED or _recorded is not None:
        return None
    compiled = _run(kernel, like, None, args, meta | OPTIONS, warmup=True)
    with torch.cuda.device_of(like):
        compiled[(1, 1, 1)]  # loads it, which tells its registers
    return compiled


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A result, or scratch, on the device of ``like``, in its type if none is given."""
    made = like.new_empty(shape, dtype=dtype)
    if (trace := _trace()) is not None:
        trace.made(made, like, tuple(shape), made.dtype)
    return made


def dense(tensor: Tensor) -> Tensor:
    made = tensor.contiguous()
    if made is not tensor and (trace := _trace()) is not None:
        trace.made(made, tensor)
    return made


def part_of(tensor: Tensor, view: Tensor) -> Tensor:
    """The view, at a place in the tensor that follows from shapes and strides."""
    if (trace := _trace()) is not None:
        trace.made(view, tensor, None, None, view.data_ptr() - tensor.data_ptr())
    return view


def compares(a: Tensor, b: Tensor) -> None:
    """Note that where the two lie in memory decides what a call does."""
    if (trace := _trace()) is not None:
        trace.compared(a, b)


def reach(tensor: Tensor) -> int:
    """Bytes from its first element to its end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def apart(tensor: Tensor, *written: Tensor) -> Tensor:
    """The tensor, or a copy where it may lie in what a launch writes: its programs run in any order."""
    result = tensor
    for cache in written:
        compares(tensor, cache)
        distance = cache.storage_offset() * cache.element_size() - tensor.storage_offset() * tensor.element_size()
        same = tensor.untyped_storage()._cdata == cache.untyped_storage()._cdata
        if same and -reach(cache) < distance < reach(tensor):
            result = tensor.clone()
    return result


def width(size: int) -> int:
    """Of a range that covers ``size``, which may be 0."""
    return max(1, triton.next_power_of_2(size))


def head_blocks(num_heads: int, *head_sizes: int) -> tuple[int, int]:
    """Heads per program, and programs per token, when a program moves about 4,096 elements of a token."""
    heads = min(width(num_heads), max(1, 4096 // max(map(width, head_sizes))))
    return heads, triton.cdiv(num_heads, heads)
