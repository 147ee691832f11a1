"""opcheck of every op: schema and mutations, fake kernel, functionalisation, on poisoned caches and odd strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

from .builders import INDEX_DTYPES, attention_options, make_caches, make_case, sliced, strided_index

OPS = torch.ops.pagedkv
LAYOUTS = pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
INDICES = pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
STRIDED = pytest.mark.parametrize("strided", [False, True])

MASKS = (
    {},
    {"causal": False, "window_left": 3, "window_right": 2, "softcap": 5.0, "scale": 0.3, "num_splits": 2},
    {"alibi": True, "sinks": True, "num_splits": 1},
)


def attention_case(layout, index_dtype, strided, mask, dtype=torch.float32):
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


@LAYOUTS
@INDICES
@STRIDED
def test_write_kv(layout, index_dtype, strided):
    caches = make_caches(3, 4, 2, 16, 8, torch.bfloat16, layout, fill=math.nan)
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    slots = torch.tensor([11, -1, 0, 7], dtype=index_dtype)  # shorter than key
    if strided:
        key, value, slots = sliced(key), sliced(value), strided_index(slots)
    opcheck(OPS.write_kv.default, (key, value, *caches, slots))


@LAYOUTS
@INDICES
@STRIDED
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", ["paged_attention", "paged_attention_with_lse"])
def test_attention(name, layout, index_dtype, strided, mask):
    case = attention_case(layout, index_dtype, strided, mask)
    opcheck(getattr(OPS, name).default, case.args, case.options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_without_cu_seqlens(dtype):
    case = make_case(dtype=dtype)
    assert case.cu_seqlens_q is None
    opcheck(OPS.paged_attention_with_lse.default, case.args)


@LAYOUTS
@INDICES
@STRIDED
def test_append(layout, index_dtype, strided):
    case = attention_case(layout, index_dtype, strided, MASKS[0])
    opcheck(OPS.paged_attention_append.default, case.append_args(), case.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@STRIDED
def test_merge_states(dtype, strided):
    out_a, out_b = torch.randn(2, 5, 3, 8).to(dtype)
    lse_a, lse_b = torch.randn(2, 5, 3)
    lse_a[0] = lse_b[:2] = -math.inf
    if strided:
        out_a, out_b, lse_a = sliced(out_a), sliced(out_b), lse_a.T.contiguous().T
    opcheck(OPS.merge_states.default, (out_a, lse_a, out_b, lse_b))


@LAYOUTS
@INDICES
def test_copy_blocks(layout, index_dtype):
    caches = [*make_caches(4, 2, 3, 8, 5, layout=layout), torch.full((4, 2, 3), math.nan)]
    for i, cache in enumerate(caches):
        cache[i] = i  # a copy of poison onto poison would change nothing
    opcheck(OPS.copy_blocks.default, (caches, torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=index_dtype)))


@LAYOUTS
@INDICES
def test_swap_blocks(layout, index_dtype):
    src, _ = make_caches(4, 2, 3, 8, 5, layout=layout, fill=1.0)
    dst, _ = make_caches(6, 2, 3, 8, 5, layout=layout)
    opcheck(OPS.swap_blocks.default, (src, dst, torch.tensor([[0, 5], [3, 1]], dtype=index_dtype)))


@LAYOUTS
@INDICES
@STRIDED
def test_gather_kv(layout, index_dtype, strided):
    case = attention_case(layout, index_dtype, strided, MASKS[0])
    seq_lens = torch.tensor(case.spec.seq_lens, dtype=index_dtype) - torch.tensor([0, 2, 0], dtype=index_dtype)
    opcheck(OPS.gather_kv.default, (case.key_cache, case.block_table, seq_lens, 6))


def test_every_op_is_checked_here():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    named = tested | {"paged_attention", "paged_attention_with_lse", "paged_attention_append"}
    assert set(SCHEMAS) <= named


@pytest.mark.parametrize("name", SCHEMAS)
def test_tags_and_public_name(name):
    tags = getattr(OPS, name).default.tags
    assert torch.Tag.pt2_compliant_tag in tags
    assert torch.Tag.needs_exact_strides in tags
    assert getattr(pagedkv_ops, name).__doc__
