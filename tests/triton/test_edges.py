"""Integers and numbers at their edges: strides past 2^31, windows near 2^31 and 2^63, infinite and capped logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv_ops import reference
from tests.ops.builders import make_case, mean_probe

from .test_interpreter_checks import call_with_source
from .worker import Kernels

F16 = torch.float16
N, S, H, D = 3, 3, 3, 16  # blocks, slots, heads: the largest index of each is 2


def far(tensor: Tensor, dim: int) -> Tensor:
    """The same values, the last index of ``dim`` past 2^31 elements. Pages that nothing touches take no memory."""
    strides, inner = [0] * tensor.dim(), 1
    for d in reversed(range(tensor.dim())):
        if d != dim:
            strides[d], inner = inner, inner * tensor.size(d)
    last = tensor.size(dim) - 1
    strides[dim] = (2**31 // last + 15) // 8 * 8  # 16 bytes and more apart, as descriptors want it
    storage = torch.empty(last * strides[dim] + inner, dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


def _arguments(op: str) -> list[Any]:
    rng = torch.Generator().manual_seed(3)

    def randn(*shape: int, dtype: torch.dtype = F16) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    caches = [randn(N, S, H, D), randn(N, S, H, D)]
    query, key, value = randn(3, H, D), randn(3, H, D), randn(3, H, D)
    table = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    slots, seq_lens = torch.tensor([8, 2, 4]), torch.tensor([9, 7, 8])
    return {
        "write_kv": [key, value, *caches, slots],
        "paged_attention": [query, *caches, table, seq_lens],
        "paged_attention_append": [query, key, value, *caches, slots, table, seq_lens],
        "gather_kv": [caches[0], table, seq_lens, 9],
        "merge_states": [query, randn(3, H, dtype=torch.float32), key, randn(3, H, dtype=torch.float32)],
        "copy_blocks": [[caches[0]], torch.tensor([[2, 0], [1, 2]])],
    }[op]


def _call(op: str, argument: int | None, dim: int) -> tuple[Any, list[Tensor]]:
    """The result and the tensors as the op left them; one argument has a far dimension."""
    from pagedkv_ops import _triton

    args = _arguments(op)
    if argument is not None:
        is_list = isinstance(args[argument], list)
        moved = far(args[argument][0] if is_list else args[argument], dim)
        args[argument] = [moved] if is_list else moved
    result = getattr(_triton, op)(*args)
    tensors = [x[0] if isinstance(x, list) else x for x in args]
    return result, [x.contiguous() for x in tensors if isinstance(x, Tensor)]


FAR = [
    ("write_kv", {0: 2, 1: 2, 2: 3, 3: 3}),
    ("paged_attention", {0: 2, 1: 3, 2: 3, 3: 2}),
    ("paged_attention_append", {0: 2, 1: 2, 2: 2, 3: 3, 4: 3, 6: 2}),
    ("gather_kv", {0: 3, 1: 2}),
    ("merge_states", {0: 2, 1: 2, 2: 2, 3: 2}),
    ("copy_blocks", {0: 3}),
]


@pytest.mark.parametrize(
    ("op", "argument", "dim"),
    [(op, argument, dim) for op, arguments in FAR for argument, dims in arguments.items() for dim in range(dims)],
)
def test_strides_whose_products_pass_2_to_31(kernels: Kernels, op: str, argument: int, dim: int) -> None:
    result, near = kernels.run(_call, op, argument, dim), kernels.run(_call, op, None, 0)
    torch.testing.assert_close(result, near, rtol=0, atol=0)


def _heads_far_apart() -> tuple[Tensor, Tensor, Tensor]:
    from pagedkv_ops import _triton

    key_cache, value_cache = (torch.empty(32, 40000, 16, 128, dtype=F16).permute(1, 2, 0, 3) for _ in range(2))
    new = torch.arange(32, dtype=F16)[:, None].repeat(1, 128)[None]
    slot, table, seq_lens = torch.tensor([39999 * 16]), torch.tensor([[39999]]), torch.tensor([1])
    _triton.write_kv(0 * new, new, key_cache, value_cache, slot)
    out = _triton.paged_attention(torch.ones_like(new), key_cache, value_cache, table, seq_lens)
    return new, out, _triton.gather_kv(value_cache, table, seq_lens, 1)[0]


def test_large_strides_on_other_dimensions(kernels: Kernels) -> None:
    """A head stride of 81,920,000: times 27 it passes 2^31."""
    new, out, gathered = kernels.run(_heads_far_apart)
    assert torch.equal(out, new)
    assert torch.equal(gathered, new)


@pytest.mark.parametrize("window", [2047, 2**31 - 2, 2**63 - 1])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_windows_at_the_end_of_the_integers(kernels: Kernels, window: int, num_splits: int) -> None:
    case = mean_probe(2048, block_size=16, num_queries=2)
    for side in ("window_left", "window_right"):
        out = kernels.op("paged_attention", *case.args, causal=False, num_splits=num_splits, **{side: window})
        torch.testing.assert_close(out, torch.full_like(out, 2047 / 2))


@pytest.mark.parametrize("window_right", [0, 3, 5, 6, 7, 100, 2**63 - 1])
def test_windows_of_rows_before_the_first_key(kernels: Kernels, window_right: int) -> None:
    options = {"causal": False, "window_right": window_right}
    case = make_case(query_lens=(7,), seq_lens=(3,), options=options)
    out, lse = kernels.op("paged_attention_with_lse", *case.args, **options)
    expected, expected_lse = case.dense()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [1e-50, 1e-30, 50.0, 101.0, 1e4, 1e20, 3e38, 1e300])
def test_softcaps_at_the_end_of_float32(kernels: Kernels, softcap: float) -> None:
    """Logits up to 3: a large cap leaves them as they are, a tiny one makes all of them equal."""
    case = make_case(query_lens=(3,), seq_lens=(9,), options={"softcap": softcap})
    case.query[1] = 0.0
    out, lse = kernels.op("paged_attention_with_lse", *case.args, **case.options)
    expected, expected_lse = case.dense()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_an_infinite_logit_leaves_an_infinite_lse(kernels: Kernels, num_splits: int) -> None:
    case = make_case(query_lens=(1,), seq_lens=(200,), heads=(2, 2), head_size=16)
    slot = case.slots(0, range(150, 151))[0]
    case.key_cache[slot // 4, slot % 4, 0] = 1e30
    case.query[0, 0] = 1e30
    _, lse = kernels.op("paged_attention_with_lse", *case.args, num_splits=num_splits)
    assert lse[0, 0] == math.inf
    assert lse[0, 1].isfinite()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_fused_product_past_float32_leaves_an_infinite_lse(kernels: Kernels, num_splits: int) -> None:
    """A compiler may fuse the scale into the subtraction: of an infinite maximum then -inf, not NaN, is left."""
    case = make_case(query_lens=(1,), seq_lens=(200,), heads=(2, 2), head_size=16)
    case.query[0, 0] *= 1e30
    plain, fused = "logits - base[:, None]", 'tl.where(logits == float("inf"), float("-inf"), logits - base[:, None])'
    call = ("paged_attention_with_lse", case.args, {"num_splits": num_splits, "scale": 1e20})
    out, lse = kernels.run(call_with_source, "attention_tile._online_softmax", plain, fused, *call)
    assert lse[0, 0] == math.inf
    assert out[0, 0].isnan().all()
    assert lse[0, 1].isfinite()


def test_merge_at_the_edges(kernels: Kernels) -> None:
    """A part that saw no key has no say, even where it is NaN; an infinite lse stays infinite."""
    out_a, out_b = torch.randn(2, 6, 1, 8)
    lse_a = torch.tensor([-math.inf, 1.0, math.inf, math.inf, -math.inf, 200.0])[:, None]
    lse_b = torch.tensor([2.0, -math.inf, -math.inf, 3.0, -math.inf, -200.0])[:, None]
    out_a[0] = out_b[1] = out_b[2] = out_a[4] = out_b[4] = math.nan
    out, lse = kernels.op("merge_states", out_a, lse_a, out_b, lse_b)
    assert lse[:, 0].tolist() == [2.0, 1.0, math.inf, math.inf, -math.inf, 200.0]
    assert torch.equal(out[[0, 1, 2, 5]], torch.stack([out_b[0], out_a[1], out_a[2], out_a[5]]))
    assert torch.equal(out[4], torch.zeros(1, 8))


def test_tensors_without_elements(kernels: Kernels) -> None:
    cache = torch.ones(2, 2, 0, 4)
    table, seq_lens = torch.tensor([[0, 1]]), torch.tensor([3])
    assert kernels.op("gather_kv", cache, table, seq_lens, 1_000_000).shape == (1, 1_000_000, 0, 4)
    assert kernels.op("gather_kv", torch.ones(2, 2, 3, 0), table, seq_lens, 5).shape == (1, 5, 3, 0)
    values = torch.ones(2, 2, 1, 0)
    _, args = kernels.op_and_args(
        "write_kv", torch.full((1, 1, 4), 7.0), torch.ones(1, 1, 0), torch.ones(2, 2, 1, 4), values, torch.tensor([3])
    )
    assert args[2][:, :, 0, 0].tolist() == [[1, 1], [1, 7]]


@pytest.mark.parametrize("op", ["write_kv", "paged_attention_append"])
def test_new_tokens_may_be_rows_of_the_cache(kernels: Kernels, op: str) -> None:
    """They are read before anything is written: here every token moves by one slot."""
    caches = torch.randn(2, 4, 4, 2, 16)
    rows = [cache[0, :3] for cache in caches]
    slots, table, seq_lens = torch.tensor([1, 2, 3]), torch.tensor([[0], [1], [2]]), torch.tensor([4, 4, 4])
    args = (*rows, *caches, slots) if op == "write_kv" else (rows[0], *rows, *caches, slots, table, seq_lens)
    expected = [x.clone() for x in args]
    out = getattr(reference, op)(*expected)
    result, after = kernels.op_and_args(op, *args)
    for cache, wanted in zip(
        after[-3 if op == "write_kv" else 3 :][:2], expected[2:4] if op == "write_kv" else expected[3:5], strict=True
    ):
        assert torch.equal(cache, wanted)
    if out is not None:
        torch.testing.assert_close(result, out)
