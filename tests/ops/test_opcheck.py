"""opcheck of every op: schema and mutations, fake kernel, functionalisation, on poisoned caches and odd strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

from .builders import Case, attention_options, make_caches, make_case, sliced, strided_index

OPS = torch.ops.pagedkv
MASKS = (
    {},
    {"causal": False, "window_left": 3, "window_right": 2, "softcap": 5.0, "scale": 0.3, "num_splits": 2},
    {"alibi": True, "sinks": True, "num_splits": 1},
)
ROWS = [  # layout, index type, strided: all pairs; mask; type
    ("nhd", torch.int32, False, MASKS[0], torch.float32),
    ("nhd", torch.int64, True, MASKS[1], torch.bfloat16),
    ("hnd", torch.int32, True, MASKS[2], torch.float16),
    ("hnd", torch.int64, False, MASKS[1], torch.float32),
    ("interleaved", torch.int32, False, MASKS[2], torch.bfloat16),
    ("interleaved", torch.int64, True, MASKS[0], torch.float32),
]


def attention_case(layout, index_dtype, strided, mask, dtype) -> Case:
    """Ragged prefill with padding rows on poisoned caches whose V is narrower than K."""
    return make_case(
        query_lens=(3, 0, 1),
        seq_lens=(7, 2, 5),
        padding_rows=2,
        v_head_size=8,
        layout=layout,
        index_dtype=index_dtype,
        strided=strided,
        dtype=dtype,
        options=attention_options(4, **mask),
    )


def attention(*row):
    case = attention_case(*row)
    return case.args, case.options


def append(*row):
    case = attention_case(*row)
    return case.append_args(), case.options


def write_kv(layout, index_dtype, strided, _mask, dtype):
    caches = make_caches(3, 4, 2, 16, 8, dtype, layout, fill=math.nan)
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    slots = torch.tensor([11, -1, 0, 7], dtype=index_dtype)  # shorter than key
    if strided:
        key, value, slots = sliced(key), sliced(value), strided_index(slots)
    return (key, value, *caches, slots), {}


def merge_states(_layout, _index_dtype, strided, _mask, dtype):
    out_a, out_b = torch.randn(2, 5, 3, 8).to(dtype)
    lse_a, lse_b = torch.randn(2, 5, 3)
    lse_a[0] = lse_b[:2] = -math.inf
    if strided:
        out_a, out_b, lse_a = sliced(out_a), sliced(out_b), lse_a.T.contiguous().T
    return (out_a, lse_a, out_b, lse_b), {}


def copy_blocks(layout, index_dtype, _strided, _mask, dtype):
    caches = [*make_caches(4, 2, 3, 8, 5, dtype, layout), torch.full((4, 2, 3), math.nan)]
    for i, cache in enumerate(caches):
        cache[i] = i  # a copy of poison onto poison would change nothing
    return (caches, torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=index_dtype)), {}


def swap_blocks(layout, index_dtype, _strided, _mask, dtype):
    src, _ = make_caches(4, 2, 3, 8, 5, dtype, layout, fill=1.0)
    dst, _ = make_caches(6, 2, 3, 8, 5, dtype, layout)
    return (src, dst, torch.tensor([[0, 5], [3, 1]], dtype=index_dtype)), {}


def gather_kv(layout, index_dtype, strided, _mask, dtype):
    case = attention_case(layout, index_dtype, strided, {}, dtype)
    seq_lens = torch.tensor(case.spec.seq_lens, dtype=index_dtype) - torch.tensor([0, 2, 0], dtype=index_dtype)
    return (case.key_cache, case.block_table, seq_lens, 6), {}


CALLS = {
    "write_kv": write_kv,
    "paged_attention": attention,
    "paged_attention_with_lse": attention,
    "paged_attention_append": append,
    "merge_states": merge_states,
    "copy_blocks": copy_blocks,
    "swap_blocks": swap_blocks,
    "gather_kv": gather_kv,
}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name, row):
    opcheck(getattr(OPS, name).default, *CALLS[name](*row))


def test_decode_without_cu_seqlens():
    case = make_case(dtype=torch.bfloat16)
    assert case.cu_seqlens_q is None
    opcheck(OPS.paged_attention_with_lse.default, case.args)


@pytest.mark.parametrize("name", SCHEMAS)
def test_tags_and_public_name(name):
    tags = getattr(OPS, name).default.tags
    assert torch.Tag.pt2_compliant_tag in tags
    assert torch.Tag.needs_exact_strides in tags
    assert getattr(pagedkv_ops, name).__doc__
