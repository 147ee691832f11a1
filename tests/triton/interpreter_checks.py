"""What Triton's interpreter does not see, as it runs one program after another on memory that is there.

In ``checked_call`` every load and store of a launch is looked at, and what is right by luck only is reported: elements
that two programs write, or one writes and another reads; elements that belong to no argument's view; and memory from
``new_empty`` that is read, or returned, before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

_LARGEST = 1 << 28  # bytes of a storage whose elements are followed one by one
_MANY = -1  # programs that read an element
_FRESH = (Tensor.new_empty, torch.empty, torch.empty_like, torch.empty_strided)


class Fault(AssertionError):
    pass


class _Storage:
    """The elements of one storage during one launch."""

    def __init__(self, view: Tensor, written: NDArray[np.bool_] | None) -> None:
        storage = view.untyped_storage()
        self.start, self.nbytes, self.size = storage.data_ptr(), storage.nbytes(), view.element_size()
        self.name = f"{tuple(view.shape)} {str(view.dtype)[6:]}"
        count = self.nbytes // self.size
        self.written = written  # since it was allocated; None: all
        self.is_followed = self.nbytes <= _LARGEST
        if self.is_followed:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.content = content.numpy()[: count * self.size].view(f"u{self.size}")
            self.owned = np.zeros(count, bool)
            self.writer, self.reader = np.zeros((2, count), np.int32)

    def add(self, view: Tensor) -> None:
        if self.is_followed and view.numel():
            assert view.element_size() == self.size, "views of one storage differ in their element's size"
            owned = torch.from_numpy(self.owned)
            owned.as_strided(view.size(), view.stride(), view.storage_offset()).fill_(True)

    def faults(self, elements: NDArray[np.int64], program: int, stored: NDArray[Any] | None) -> Iterator[str]:
        """What is wrong with an access of ``program``, which it records; programs may store the same bits."""
        if not self.owned[elements].all():
            yield "outside of every view"
        writer, reader = self.writer[elements], self.reader[elements]
        foreign = (writer != 0) & (writer != program)
        if stored is None:
            if foreign.any():
                yield "read after another program's write"
            if self.written is not None and not self.written[elements].all():
                yield "read before it was written"
            self.reader[elements] = np.where((reader == 0) | (reader == program), program, _MANY)
            return
        if foreign.any() and (self.content[elements] != stored.view(self.content.dtype))[foreign].any():
            yield "written by two programs"
        if ((reader != 0) & (reader != program)).any():
            yield "written after another program's read"
        self.writer[elements] = program
        if self.written is not None:
            self.written[elements] = True


class _Checks(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[str, None] = {}  # in order, each once
        self.fresh: dict[int, tuple[Tensor, NDArray[np.bool_]]] = {}  # by address; kept, so that no other takes it
        self.kernel, self.program = "", 0
        self.storages: list[_Storage] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _FRESH and result.device.type == "cpu" and (storage := result.untyped_storage()).nbytes() > 0:
            written = np.zeros(storage.nbytes() // result.element_size(), bool)
            self.fresh[storage.data_ptr()] = result, written
        return result

    def begin(self, kernel: str, arguments: Any) -> None:
        storages: dict[int, _Storage] = {}
        for view in tree_leaves(arguments):
            if isinstance(view, Tensor) and (address := view.untyped_storage().data_ptr()):
                _, written = self.fresh.get(address, (None, None))
                storages.setdefault(address, _Storage(view, written)).add(view)
        self.kernel, self.storages = kernel, sorted(storages.values(), key=lambda storage: storage.start)
        self.starts = np.array([storage.start for storage in self.storages])
        self.ends = np.array([storage.start + storage.nbytes for storage in self.storages])

    def access(self, pointers: Any, mask: Any, value: Any = None) -> Any:
        """Of a load, or a store of ``value``: the mask without addresses that are outside of every storage."""
        addresses = pointers.data[mask.data].astype(np.int64)
        if not addresses.size:
            return mask
        stored = None if value is None else np.broadcast_to(value.data, pointers.data.shape)[mask.data]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (which < 0) | (addresses + size > self.ends[which])
        if outside.any():
            self.report("outside of every tensor", value, "")
            mask = mask.clone()
            mask.data[mask.data] = ~outside
        for i in np.unique(which[~outside]):
            storage, here = self.storages[i], (which == i) & ~outside
            if storage.is_followed:
                elements = (addresses[here] - storage.start) // storage.size
                for fault in storage.faults(elements, self.program, None if stored is None else stored[here]):
                    self.report(fault, value, storage.name)
        return mask

    def report(self, fault: str, value: Any, name: str) -> None:
        frame = sys._getframe()
        while "pagedkv_ops" not in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        self.reports[f"{fault}: {self.kernel}, {'load' if value is None else 'store'} at {place} {name}".rstrip()] = (
            None
        )

    def check_result(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel():
                fresh = self.fresh.get(tensor.untyped_storage().data_ptr())
                if fresh is not None and not fresh[1].all():
                    self.reports[f"returned before it was written: {tuple(tensor.shape)}"] = None


_current: _Checks | None = None


def checked_call(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; raise ``Fault`` where a launch of it, or its result, is at fault."""
    global _current
    with _Checks() as _current:
        try:
            result = function(*args)
            _current.check_result(result)
            reports = list(_current.reports)
        finally:
            _current = None
    if reports:
        raise Fault("\n".join(reports))
    return result


def _before(cls: type, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(cls, name)

    @wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            args = hook(_current, self, *args) or args
        return original(self, *args, **kwargs)

    setattr(cls, name, hooked)


def _refuse(checks: _Checks, *_: Any) -> None:
    raise NotImplementedError("atomic operations are not among what these checks know")


def _numbered(checks: _Checks, builder: Any, x: int, y: int, z: int) -> None:
    _, height, depth = builder.grid_dim
    checks.program = 1 + (x * height + y) * depth + z


def _load(checks: _Checks, _: Any, pointers: Any, mask: Any, *rest: Any) -> tuple[Any, ...]:
    return pointers, checks.access(pointers, mask), *rest


def _store(checks: _Checks, _: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> tuple[Any, ...]:
    return pointers, value, checks.access(pointers, mask, value), *rest


_before(GridExecutor, "__call__", lambda checks, executor, *args: checks.begin(executor.fn.__name__, args))
_before(InterpreterBuilder, "set_grid_idx", _numbered)
_before(InterpreterBuilder, "create_masked_load", _load)
_before(InterpreterBuilder, "create_masked_store", _store)
_before(InterpreterBuilder, "create_atomic_cas", _refuse)
_before(InterpreterBuilder, "create_atomic_rmw", _refuse)
