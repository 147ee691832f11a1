"""Prefill that loads whole blocks by descriptors, interpreted: a row of the table may ask for it, none does yet."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.builders import attention_options, make_case, mean_probe

from .test_edges import far
from .worker import Kernels

ROW = (64, 32, 4, 2, 1, True)


def _attend(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bool, tuple[Tensor, Tensor]]:
    """Whether chunks take boxes where the table wants them, and the result."""
    from pagedkv_ops import _triton
    from pagedkv_ops._triton import config, replay, tuned
    from pagedkv_ops._triton.launch import recording

    arch = config.device(args[0])[0]
    rows = {key: ROW for key in tuned.TABLE if key[:2] == (arch, "prefill")}
    replay.forget()
    with mock.patch.dict(tuned.TABLE, rows):
        with recording() as launches:
            _triton.paged_attention_with_lse(*args, **options)
        result = _triton.paged_attention_with_lse(*args, **options)
    replay.forget()
    return launches[0].meta["SPEC"].BOXED, result


def assert_matches_dense(kernels: Kernels, boxed: bool, **spec: Any) -> None:
    case = make_case(**{"query_lens": (60, 1, 0, 23), "seq_lens": (200, 70, 4, 23), "head_size": 64} | spec)
    taken, (out, lse) = kernels.run(_attend, case.args, case.options)
    assert taken == boxed
    expected, expected_lse = case.dense()
    error = 2e-5 if case.query.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=error, atol=error)


@pytest.mark.parametrize(
    "spec",
    [
        {"block_size": 16, "layout": "hnd"},
        {"block_size": 16, "head_size": 80, "v_head_size": 32, "dtype": torch.float16},
        {"block_size": 48},  # boxes of 16 slots
        {"block_size": 64, "layout": "interleaved"},  # two boxes of a block
        {"block_size": 32, "dtype": torch.float16, "cache_dtype": torch.float32, "index_dtype": torch.int32},
        {"block_size": 16, "cache_dtype": torch.bfloat16, "padding_rows": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 37},
        {"causal": False, "window_right": 5, "num_splits": 3},
        {"softcap": 3.0, "alibi": True, "sinks": True},
    ],
    ids=str,
)
def test_boxes_give_dense_attention(kernels: Kernels, spec: dict[str, Any], options: dict[str, Any]) -> None:
    """On caches that are NaN outside of what is visible."""
    assert_matches_dense(kernels, True, **spec, options=attention_options(4, **options))


@pytest.mark.parametrize(
    "spec",
    [
        {"block_size": 8},
        {"block_size": 16, "head_size": 61},  # strides of 244 bytes
        {"block_size": 16, "options": {"num_splits": 1}},  # one configuration for any number of tokens
    ],
    ids=str,
)
def test_what_no_descriptor_can_name_is_loaded_as_before(kernels: Kernels, spec: dict[str, Any]) -> None:
    assert_matches_dense(kernels, False, **spec)


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1, 2**40])
def test_block_ids_out_of_range_are_not_followed(kernels: Kernels, bad: int) -> None:
    case = mean_probe(64, block_size=16, num_queries=40)
    caches = [torch.randn(9, 16, 1, 64) for _ in range(2)]
    query, tables = torch.randn(40, 1, 64), (case.seq_lens, case.cu_seqlens_q)
    without = [cache.index_fill(0, torch.tensor(1), 0.0) for cache in caches]
    _, (expected, _) = kernels.run(_attend, (query, *without, torch.tensor([[3, 1, 8, 0]]), *tables), {})
    boxed, (out, _) = kernels.run(_attend, (query, *caches, torch.tensor([[3, bad, 8, 0]]), *tables), {})
    assert boxed
    torch.testing.assert_close(out, expected)


def _attend_far(argument: int | None, dim: int) -> tuple[bool, tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(4)
    query, *caches = (torch.randn(shape, generator=rng).half() for shape in [(40, 3, 16), *[(3, 16, 3, 16)] * 2])
    args = [query, *caches, torch.tensor([[2, 0, 1]]), torch.tensor([47]), torch.tensor([0, 40])]
    if argument is not None:
        args[argument] = far(args[argument], dim)
    return _attend(tuple(args), {})


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("argument", [1, 2])
def test_strides_whose_products_pass_2_to_31(kernels: Kernels, argument: int, dim: int) -> None:
    (boxed, result), near = kernels.run(_attend_far, argument, dim), kernels.run(_attend_far, None, 0)
    assert boxed
    torch.testing.assert_close(result, near[1], rtol=0, atol=0)
