"""Puts the schemas, fake kernels and the autograd guard into PyTorch's dispatcher, once per process.

The library object lives on ``torch.ops.pagedkv``: dropping it would remove the ops, and a second import of this package
(reload, another path) must find the first one's ops instead of defining them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
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


def _autograd_guard(name: str) -> Callable[..., Any]:
    """Raises for inputs that require grad; costs 3 us under no_grad and nothing under inference_mode."""
    overload = op(name)

    def guard(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors((*args, *kwargs.values()))):
            raise RuntimeError(
                f"{name}: the paged path has no autograd, but an input requires grad; "
                "call it under torch.no_grad() or torch.inference_mode(), or detach the input"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return guard


if is_first_import:
    _namespace._library = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for _name, _schema in SCHEMAS.items():
        _namespace._library.define(_name + _schema, tags=TAGS)
        _namespace._library.impl(_name, _autograd_guard(_name), "Autograd", with_keyset=True)
