"""Bad scales of quantised caches, and what quantised caches cannot hold."""

from __future__ import annotations

import math
from typing import Any

import torch

from .changes import OWN_PLACE, Bad, put, to, zeros


def quantised(**changes: Any) -> dict[str, Any]:
    """Changes that make the caches int8 and give each a scale; ``changes`` may undo that."""
    to_int8 = to(torch.int8)
    return {"key_cache": to_int8, "value_cache": to_int8, "k_scale": torch.ones(1), "v_scale": torch.ones(2)} | changes


FIXED_SCALES: Bad = [
    ("k_scale must be None for a key_cache in float32, got a tensor", zeros(1)),
    ("v_scale must be None for a value_cache in float32, got a tensor", zeros(5, 4, 2)),
    ("k_scale must be given for a key_cache in int8, got None", quantised(k_scale=None)),
    (
        "v_scale must be given for a value_cache in float8_e4m3fn, got None",
        quantised(value_cache=to(torch.float8_e4m3fn), v_scale=None),
    ),
    ("k_scale must be [1 or num_kv_heads], got [1, 2]", quantised(k_scale=zeros(1, 2))),
    ("k_scale must be float32, got bfloat16", quantised(k_scale=zeros(2, dtype=torch.bfloat16))),
    ("v_scale must be on cpu like value_cache, got meta", quantised(v_scale=zeros(1).to("meta"))),
    ("v_scale.size(0) must be 1 or 2 (value_cache.size(2)), got 4", quantised(v_scale=zeros(4))),
]
READ_SCALES: Bad = [  # of each token and head
    ("v_scale must be float32, got float16", quantised(v_scale=zeros(5, 4, 2, dtype=torch.float16))),
    ("k_scale must be on cpu like key_cache, got meta", quantised(k_scale=zeros(5, 4, 2).to("meta"))),
    ("k_scale.size(0) must be 5 like key_cache.size(0), got 4", quantised(k_scale=zeros(4, 4, 2))),
    ("v_scale.size(1) must be 4 like value_cache.size(1), got 5", quantised(v_scale=zeros(5, 5, 2))),
    ("v_scale.size(2) must be 2 like value_cache.size(2), got 1", quantised(v_scale=zeros(5, 4, 1))),
]
WRITTEN_SCALES: Bad = [
    ("k_scale must be [1 or num_kv_heads], got [5, 4, 2]", quantised(k_scale=zeros(5, 4, 2))),
    ("k_scale must be None beside k_scale_cache, got a tensor", quantised(k_scale_cache=zeros(5, 4, 2))),
    ("v_scale_cache must be None for a value_cache in float32, got a tensor", zeros(5, 4, 2)),
    (
        "k_scale_cache must be [num_blocks, block_size, num_kv_heads], got [2]",
        quantised(k_scale=None, k_scale_cache=zeros(2)),
    ),
    (
        "v_scale_cache must be float32, got float64",
        quantised(v_scale=None, v_scale_cache=zeros(5, 4, 2, dtype=torch.float64)),
    ),
    (
        "v_scale_cache must be on cpu like value_cache, got meta",
        quantised(v_scale=None, v_scale_cache=zeros(5, 4, 2).to("meta")),
    ),
    (
        "k_scale_cache.size(0) must be 5 like key_cache.size(0), got 6",
        quantised(k_scale=None, k_scale_cache=zeros(6, 4, 2)),
    ),
]

_SCALES = torch.zeros(6, 4, 2)
_NAN = "must be a number, which int8 can hold, got nan"
STORED: Bad = [
    ("k_scale[0] must be positive and finite, got 0.0", quantised(k_scale=torch.zeros(1))),
    ("v_scale[1] must be positive and finite, got nan", quantised(v_scale=torch.tensor([0.5, math.nan]))),
    ("v_scale[0] must be positive and finite, got -2.5", quantised(v_scale=torch.tensor([-2.5, 1.0]))),
    ("k_scale[0] must be positive and finite, got inf", quantised(k_scale=torch.tensor([math.inf]))),
    (f"key[1, 1, 15] {_NAN}", quantised(key=put([1, 1, 15], math.nan))),
    (f"value[3, 0, 2] {_NAN}", quantised(value=put([3, 0, 2], math.nan))),
    (
        f"value[0, 1, 7] {_NAN}",
        quantised(value=lambda t: put([0, 1, 7], -math.nan)(t.bfloat16()), v_scale=None, v_scale_cache=zeros(5, 4, 2)),
    ),
    (f"key[0, 0, 0] {_NAN}", quantised(key=lambda t: put([0, 0, 0], math.nan)(t.half()))),
    (
        f"k_scale_cache {OWN_PLACE} [8, 0, 1]",
        quantised(k_scale=None, k_scale_cache=zeros(5, 4, 2)[:, :1].expand(5, 4, 2)),
    ),
    (
        f"v_scale_cache {OWN_PLACE} [0, 2, 1]",
        quantised(v_scale=None, v_scale_cache=zeros(1, 4, 2).expand(5, 4, 2)),
    ),
    (
        "k_scale_cache and v_scale_cache must not share elements",
        quantised(k_scale=None, v_scale=None, k_scale_cache=_SCALES[:5], v_scale_cache=_SCALES[1:]),
    ),
]
