"""Puts the schemas, fake kernels and guards into PyTorch's dispatcher, once per process.

The library object lives on ``torch.ops.pagedkv``: dropping it would remove the ops, and a second import of this package
(reload, another path) must find the first one's ops instead of defining them again.
"""

from __future__ import annotations

import functools
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


@functools.cache
def written(name: str) -> Callable[..., list[torch.Tensor]]:
    """A function of the op's positional arguments that lists the tensors its schema declares as written."""
    arguments = op(name)._schema.arguments
    indices = [i for i, argument in enumerate(arguments) if argument.is_write]
    lists = any("List" in str(arguments[i].type) for i in indices)

    def tensors(args: Any) -> list[torch.Tensor]:
        most = len(args)  # torch drops defaults at the end
        values = [args[i] for i in indices if i < most and args[i] is not None]
        return list(_tensors(values)) if lists else values

    return tensors


def _autograd_guard(name: str) -> Callable[..., Any]:
    """Refuse inputs that require grad or carry a tangent, and count writes in the tensors' versions.

    A backward that saved what was overwritten then fails instead of using it. This costs 3 us under no_grad and nothing
    under inference_mode, where it does not run and the kernels count: a Python kernel on ADInplaceOrView takes 5 us.
    """
    overload = op(name)
    written_tensors = written(name)
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
            torch._C._increment_version(written_tensors(args))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return guard


def _lazy_view_guard(name: str) -> Callable[..., Any]:
    """Refuse to write into lazily negated or conjugated views; make such views real where they are read.

    torch's own kernel runs the op on a copy, and may fail between two arguments when it copies back.
    """
    overload = op(name)
    arguments = overload._schema.arguments

    def real(argument: Any, label: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [real(argument, f"{label}[{i}]", item) for i, item in enumerate(value)]
        if not isinstance(value, torch.Tensor):
            return value
        for kind, is_lazy in (("negated", value.is_neg()), ("conjugated", value.is_conj())):
            if argument.is_write and is_lazy:
                raise RuntimeError(f"{name}: {label} must hold the values that it shows, got a lazily {kind} view")
        return value.resolve_neg().resolve_conj()

    def guard(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in arguments), args)) | kwargs  # noqa: B905
        return overload(**{a.name: real(a, a.name, given[a.name]) for a in arguments if a.name in given})

    return guard


if is_first_import:
    _namespace._library = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for _name, _schema in SCHEMAS.items():
        _namespace._library.define(_name + _schema, tags=TAGS)
        _namespace._library.impl(_name, _autograd_guard(_name), "Autograd", with_keyset=True)
        for _key in ("Negative", "Conjugate") if op(_name)._schema.is_mutable else ():
            _namespace._library.impl(_name, _lazy_view_guard(_name), _key)
