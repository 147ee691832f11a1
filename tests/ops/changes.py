"""Changes that make a good argument of an op a bad one: functions of the good tensor, or new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Bad = list[tuple[str, Any]]  # the error's text without the op's name, and the change that has to give it
OWN_PLACE = "must have a place of its own in memory for each element, got strides"


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def every_other(tensor: Tensor) -> Tensor:
    """The last dimension strided by two."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.size(-1), dtype=tensor.dtype)[..., ::2]


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def put(index: Any, value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put([torch.tensor(i) for i in index], torch.tensor(value).to(tensor.dtype))


def drop(dim: int) -> Callable[[Tensor], Tensor]:
    """One element less along ``dim``."""
    return lambda tensor: tensor.narrow(dim, 0, tensor.size(dim) - 1)


def outer(tensor: Tensor) -> Tensor:
    return tensor[None]


def first(tensor: Tensor) -> Tensor:
    return tensor[0]


def no_blocks(tensor: Tensor) -> Tensor:
    return tensor[:0]


def expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """One element along ``dim`` for all."""
    return lambda tensor: tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)


def overlapping_rows(tensor: Tensor) -> Tensor:
    """Each block starts at the last row of the one before it."""
    strides = (tensor.stride(0) - tensor.stride(1), *tensor.stride()[1:])
    return torch.zeros_like(tensor).as_strided(tensor.shape, strides)
