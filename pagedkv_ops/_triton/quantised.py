"""What quantised caches add to the kernels: how elements are stored and read, and their scales.

Bits of float8 are made and read by integer operations, on every device alike: Triton has no float8_e4m3fn below compute
capability 8.9, and its interpreter rounds neither float8 type as a device does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import QUANTISED_MAX
from .launch import part_of

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # "": a float type
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_ROUNDS = tl.constexpr(float(2**23))  # units above it float32 has no fractions


class Scale(NamedTuple):
    """Of [N, S, Hkv], or of a head or tensor, whose other strides are 0."""

    ptr: Any
    stride_block: int
    stride_slot: int
    stride_head: int


def scale_of(scale: Tensor | None) -> Scale | None:
    if scale is None or scale.dim() == 3:
        return None if scale is None else Scale(scale, *scale.stride())
    return Scale(scale, 0, 0, scale.stride(0) if scale.size(0) > 1 else 0)


def is_per_token(scale: Tensor | None) -> bool:
    return scale is not None and scale.dim() == 3


def compute_dtype(query: Tensor, cache: Tensor) -> torch.dtype:
    """Operands of the matrix products: every quantised number is one of each float type."""
    return query.dtype if cache.dtype in QUANTISED_MAX else torch.promote_types(query.dtype, cache.dtype)


def as_stored(cache: Tensor) -> Tensor:
    """A cache as the kernels take it: float8 as bytes."""
    if FORMATS.get(cache.dtype, "int8") == "int8":
        return cache
    return part_of(cache, cache.view(torch.uint8))


@triton.jit
def decode(x, FORMAT: tl.constexpr):
    """float32 of what is stored; NaN and infinities of float8 stay such."""
    if FORMAT == "e5m2":  # the upper half of a float16
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3":  # the bits of a float16 of 2**-8 times the value
        half = (((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((x & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return x.to(tl.float32)


@triton.jit
def _float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The byte of a float32 in range: rounded to nearest even where the last bit of its binade, or the least, is."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF).to(tl.int32), 128 - BIAS)
    # adding and taking away 2**23 units of the last bit
    rounding = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    magnitude = (tl.abs(x) + rounding) - rounding
    normal = (magnitude.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    below = (magnitude * (1 << (BIAS + MANTISSA - 1))).to(tl.int32)
    byte = tl.where(exponent == 128 - BIAS, below, normal)
    # 2**(1 - BIAS) and what is rounded up to it count as units just as well: the encoding is continuous
    byte = tl.where(x != x, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr, FORMAT: tl.constexpr):
    """float32 [H, D] divided by the scale [H], saturated and rounded to nearest even; NaN is 0 in int8."""
    is_nan = x != x
    x = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, x), -_FLOAT32_MAX), _FLOAT32_MAX)
    scale = tl.broadcast_to(scale[:, None], x.shape)
    x = tl.where(scale == 0.0, x * 0.0, tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)))
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if FORMAT == "int8":
        stored = ((x + 1.5 * _ROUNDS) - 1.5 * _ROUNDS).to(tl.int8)
    else:
        x = tl.where(is_nan, float("nan"), x)
        if FORMAT == "e4m3":
            stored = _float8(x, 3, 7)
        else:
            stored = _float8(x, 2, 15)
    return stored


@triton.jit
def new_scale(x, LARGEST: tl.constexpr):
    """[H], of the largest finite magnitude in each row of [H, D]."""
    magnitude = tl.abs(x)
    highest = tl.max(tl.where(magnitude <= _FLOAT32_MAX, magnitude, 0.0), 1)
    return tl.div_rn(highest, tl.full(highest.shape, LARGEST, tl.float32))
