"""Puts the schemas, fake kernels and the autograd guard into PyTorch's dispatcher, once per process.

The library object lives on ``torch.ops.pagedkv``: dropping it would remove the ops, and a second import of this package
(reload, another path) must find the first one's ops instead of defining them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.library import Library

from .schema import NAMESPACE, SCHEMAS, TAGS

F = TypeVar("F", bound=Callable[..., Any])

_namespace = getattr(torch.ops, NAMESPACE)
is_first_import = "_library" not in vars(_namespace)


def op(name: str) -> Any:
    """The overload ``torch.ops.pagedkv.<name>.default``; public functions bind it once, as look-ups cost 0.1 us."""
    return getattr(_namespace, name).default


def register_fake(name: str) -> Callable[[F], F]:
    """Decorator: the function gives the op's output on fake tensors, after the op's checks."""

    def register(function: F) -> F:
        if is_first_import:
            torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=_namespace._library)
        return function

    return register


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


def _has_tangent(tensors: Any) -> bool:
    """Whether forward-mode AD (dual tensors, torch.func.jvp) follows one of them."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)  # type: ignore[no-untyped-call]


def _written(overload: Any) -> Callable[..., list[torch.Tensor]]:
    """A function of the op's arguments that lists the tensors its schema declares as written."""
    writes = [a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments]
    indices = [i for i, a in enumerate(overload._schema.arguments) if writes[i] and not a.kwarg_only]
    names = [a.name for i, a in enumerate(overload._schema.arguments) if writes[i] and a.kwarg_only]

    def written(args: Any, kwargs: Any) -> list[torch.Tensor]:
        values = [args[i] for i in indices if i < len(args)]
        if kwargs:
            values += [kwargs[name] for name in names if name in kwargs]
        return list(_tensors(values))

    return written


def _guards(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op's kernels for the keys Autograd and ADInplaceOrView; neither runs under inference_mode.

    The first refuses inputs that require grad or carry a tangent, and does what the second is for on the way: a kernel
    of its own would cost 2 us more. The second runs alone where a caller has excluded autograd. Writes count in the
    tensors' versions, so that a backward that saved what was overwritten fails instead of using it.
    """
    overload = op(name)
    written = _written(overload)
    is_mutable = overload._schema.is_mutable

    def guard(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if (grad := torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            tensors = list(_tensors((*args, *kwargs.values())))
            if (grad and any(t.requires_grad for t in tensors)) or _has_tangent(tensors):
                raise RuntimeError(
                    f"{name}: the paged path has no autograd, but an input requires grad or carries a tangent; "
                    "call it under torch.no_grad() or torch.inference_mode(), or detach the input"
                )
        if is_mutable:
            torch._C._increment_version(written(args, kwargs))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    def count_writes(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        torch._C._increment_version(written(args, kwargs))
        return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return guard, count_writes


if is_first_import:
    _namespace._library = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for _name, _schema in SCHEMAS.items():
        _namespace._library.define(_name + _schema, tags=TAGS)
        _guard, _count_writes = _guards(_name)
        _namespace._library.impl(_name, _guard, "Autograd", with_keyset=True)
        if op(_name)._schema.is_mutable:
            _namespace._library.impl(_name, _count_writes, "ADInplaceOrView", with_keyset=True)
