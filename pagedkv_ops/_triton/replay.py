"""Makes a call's launches again: of a call of known types, shapes and strides only the addresses are new.

The first call of its kind runs the op: checks, plan, and Triton's search for the compiled kernel. What it allocated and
launched is kept, without any tensor. Where the next call's addresses are as divisible by 16 (Triton compiles for that)
and its tensors lie as much apart, it allocates the same and starts the compiled kernels with its own addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from . import debug, launch

_MOST_KINDS = 4096  # of calls, per op; then all are forgotten
_MOST_VARIANTS = 64  # of addresses, per kind
_ALIGNMENT = 15  # the bits of an address that Triton looks at

driver = triton.runtime.driver


class _Step(NamedTuple):
    """How the next pointer of a call comes about, from one that it has."""

    base: int
    shape: tuple[int, ...] | None = None  # a new tensor on the base's device
    dtype: torch.dtype | None = None
    distance: int | None = None  # a view; neither: the base made contiguous


class _Start(NamedTuple):
    run: Callable[..., None]
    kernel: CompiledKernel
    grid: tuple[int, int, int]
    args: tuple[Any, ...]  # a pointer as its number, see below
    moving: tuple[tuple[int, tuple[int, ...] | int, tuple[Any, ...]], ...]  # argument, its pointers, what follows them


def _start(kernel: CompiledKernel, grid: tuple[int, int, int], stream: int, args: list[Any]) -> None:
    """As ``kernel[grid](*args)``, which spends 2 us on hooks even where nobody has any."""
    hooks = triton.knobs.runtime
    if getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True):
        kernel[grid](*args, stream=stream)
    else:
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)


class Replay(NamedTuple):
    steps: tuple[_Step, ...]
    starts: tuple[_Start, ...]
    results: Any  # the number of a pointer, or several, or None

    def run(self, tensors: list[Any], pointers: list[int], stream: int) -> Any:
        for base, shape, dtype, distance in self.steps:
            if distance is not None:
                tensors.append(None)
                pointers.append(pointers[base] + distance)
                continue
            like = tensors[base]
            made = like.contiguous() if shape is None else like.new_empty(shape, dtype=dtype)
            tensors.append(made)
            pointers.append(made.data_ptr())
        get = pointers.__getitem__
        for run, kernel, grid, args, moving in self.starts:
            args = list(args)
            for position, numbers, rest in moving:
                if type(numbers) is int:
                    args[position] = pointers[numbers]
                else:
                    args[position] = (*map(get, numbers), *rest)
            run(kernel, grid, stream, args)
        if type(self.results) is tuple:
            return tuple([None if number is None else tensors[number] for number in self.results])
        return None if self.results is None else tensors[self.results]


class Trace:
    """Of one call: what it allocates and launches, and which arguments' places in memory it compares."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.tensors = list(inputs)  # the i-th is pointer i
        self.steps: list[_Step] = []
        self.starts: list[_Start] = []
        self.pairs: list[tuple[int, int, int, int]] = []
        self.is_complete = True

    def number(self, tensor: Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        self.is_complete = False  # a copy whose content came from elsewhere
        return 0

    def made(self, tensor: Tensor, base: Tensor, *how: Any) -> None:
        number = self.number(base)
        if how and how[0] is not None:  # a new tensor: any of its device will do
            number = 0
        self.steps.append(_Step(number, *how))
        self.tensors.append(tensor)

    def compared(self, a: Tensor, b: Tensor) -> None:
        self.pairs.append((self.number(a), self.number(b), launch.reach(a), launch.reach(b)))

    def launched(self, compiled: Any, launched: launch.Launch) -> None:
        names = launched.kernel.arg_names
        if not isinstance(compiled, CompiledKernel) or compiled.metadata.target.backend != "cuda":
            self.is_complete = False  # AMD's kernels also depend on the sizes of storages
            return
        args = [*launched.args, *(launched.meta[name] for name in names[len(launched.args) :])]
        moving: list[Any] = []
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                moving.append((position, self.number(value), ()))
                args[position] = None
            elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):  # pointers come first
                numbers = tuple(self.number(part) for part in value if isinstance(part, Tensor))
                moving.append((position, numbers, tuple(value[len(numbers) :])))
                args[position] = None
        run = _start
        if compiled.metadata.global_scratch_size:
            run = launch.with_scratch(run, self.tensors[0].device)
        self.starts.append(_Start(run, compiled, (*launched.grid, 1, 1)[:3], tuple(args), tuple(moving)))

    def replay(self, results: Any) -> Replay | None:
        if isinstance(results, tuple):
            numbers: Any = tuple(None if result is None else self.number(result) for result in results)
        else:
            numbers = None if results is None else self.number(results)
        return Replay(tuple(self.steps), tuple(self.starts), numbers) if self.is_complete else None


class _Kind:
    """The calls of one op with the same types, shapes, strides, devices and options."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int, int, int]] = []
        self.variants: dict[Any, Replay | None] = {}  # None: a copy is needed first, the op makes it every time

    def variant(self, pointers: list[int]) -> Any:
        """What a call depends on beyond its kind: the divisibility of addresses, and distances within shared memory."""
        bits = 0
        for pointer in pointers:
            bits |= pointer
        near: tuple[Any, ...] = ()
        for i, j, reach_i, reach_j in self.pairs:
            distance = pointers[j] - pointers[i]
            if -reach_j < distance < reach_i:
                near += ((i, j, distance),)
        return near, tuple([p & _ALIGNMENT for p in pointers]) if bits & _ALIGNMENT else None

    def traced(self, op: Callable[..., Any], args: Any, options: Any, tensors: list[Tensor], addresses: Any) -> Any:
        trace = Trace(tensors)
        with launch.tracing(trace):
            results = op(*args, **options)
        self.pairs = trace.pairs
        if len(self.variants) >= _MOST_VARIANTS:
            self.variants.clear()
        self.variants[self.variant(addresses)] = trace.replay(results)
        return results


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            key += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key, tensors)
        else:
            key.append(value)


_memories: list[dict[Any, _Kind]] = []  # of each op


def forget() -> None:
    """For who changes what plans follow from, such as the table of configurations."""
    for kinds in _memories:
        kinds.clear()


def replayed(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, which for calls of a known kind costs a look-up and the launches. Debug mode checks every call anew."""
    kinds: dict[Any, _Kind] = {}
    _memories.append(kinds)

    @functools.wraps(op)
    def call(*args: Any, **options: Any) -> Any:
        if launch.INTERPRETED or launch.is_aside() or debug.enabled():
            return op(*args, **options)
        key: list[Any] = []
        tensors: list[Tensor] = []
        _describe(args, key, tensors)
        key += options
        _describe(options.values(), key, tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        kind = kinds.get(found := tuple(key))
        variant = None if kind is None else kind.variants.get(kind.variant(pointers))
        if variant is None:
            return first(found, kind, args, options, tensors, pointers)
        device, active = tensors[0].get_device(), driver.active
        current = active.get_current_device()
        if device in (current, -1):
            return variant.run(tensors, pointers, active.get_current_stream(current))
        with torch.cuda.device(device):
            return variant.run(tensors, pointers, active.get_current_stream(device))

    def first(key: Any, kind: _Kind | None, args: Any, options: Any, tensors: Any, pointers: Any) -> Any:
        kind = kind or _Kind()
        results = kind.traced(op, args, options, tensors, pointers)
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kinds[key] = kind
        return results

    call.kinds = kinds
    return call
