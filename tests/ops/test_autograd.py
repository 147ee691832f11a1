"""What autograd sees of the ops: inputs it can not follow are refused, writes count in the tensors' versions."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

from .bad_inputs import float_tensors, good_call, replaced

WRITES = {
    op: {a.name for a in getattr(torch.ops.pagedkv, op).default._schema.arguments if a.is_write} for op in SCHEMAS
}
MUTABLE = [op for op in SCHEMAS if WRITES[op]]
OPS = pytest.mark.parametrize("op", SCHEMAS)
MUTABLE_OPS = pytest.mark.parametrize("op", MUTABLE)
UNTRACKED = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def tensors(op, call, *, written):
    """Those that the op writes, or the others."""
    leaves = [leaf for name, value in call.items() if (name in WRITES[op]) == written for leaf in tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def versions(op, call, *, written):
    return [tensor._version for tensor in tensors(op, call, written=written)]


def dual(tensor):
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


def keywords(op):
    return lambda **kwargs: getattr(pagedkv_ops, op)(**kwargs)


@UNTRACKED
@OPS
def test_versions_of_written_arguments_grow_and_no_others(op, mode, run):
    call = good_call(op)
    with mode():
        before, others = versions(op, call, written=True), versions(op, call, written=False)
        assert bool(before) == (op in MUTABLE)
        run(keywords(op), **call)
        assert all(now > then for now, then in zip(versions(op, call, written=True), before, strict=True))
        assert versions(op, call, written=False) == others


@UNTRACKED
@MUTABLE_OPS
def test_versions_grow_before_a_cuda_launch(op, mode, monkeypatch):
    """The launchers are Python: under inference_mode they have no guard above them."""
    call = good_call(op)
    backends = sys.modules["pagedkv_ops.backends"]  # the package's function of this name hides the module
    monkeypatch.setattr(backends, "_launcher", lambda name: lambda *args, **kwargs: None)
    with mode():
        before, others = versions(op, call, written=True), versions(op, call, written=False)
        backends._cuda_op(op, *call.values())
        after = versions(op, call, written=True)
        assert versions(op, call, written=False) == others
    assert [now - then for now, then in zip(after, before, strict=True)] == [mode is torch.inference_mode] * len(before)


@UNTRACKED
@MUTABLE_OPS
def test_backward_of_a_product_that_saved_a_written_tensor_fails(op, mode, run):
    """y = (cache * w).sum(), then a write, then y.backward(): torch's own error, no wrong gradient."""
    call = good_call(op)
    products = [(t * torch.ones_like(t, requires_grad=True)).sum() for t in tensors(op, call, written=True)]
    with mode():
        run(keywords(op), **call)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@OPS
def test_inference_mode_calls_no_python(op):
    """It skips Autograd, but a Python kernel on ADInplaceOrView would run there, and cost a write 5 us."""
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{op}", "ADInplaceOrView")


@MUTABLE_OPS
def test_inference_tensors_have_no_version_and_can_be_written(op):
    with torch.inference_mode():
        call = good_call(op)
        getattr(pagedkv_ops, op)(**call)
    with torch.no_grad():
        getattr(pagedkv_ops, op)(**call)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(("op", "name", "index"), [(op, *place) for op in SCHEMAS for place in float_tensors(op)])
def test_dual_tensor_is_refused(op, name, index, mode):
    """no_grad does not end forward-mode AD: a result without a tangent would be a derivative of 0."""
    with forward_ad.dual_level(), mode():
        call = replaced(op, name, index, dual)
        with pytest.raises(RuntimeError, match=f"{op}: the paged path has no autograd, but .* carries a tangent"):
            getattr(pagedkv_ops, op)(**call)


@OPS
def test_dual_tensors_are_refused_in_compiled_functions_and_by_jvp(op):
    place = next(float_tensors(op))
    torch._dynamo.reset()
    with forward_ad.dual_level():
        call = replaced(op, *place, dual)
        with pytest.raises(Exception, match=f"{op}: the paged path has no autograd, but .* carries a tangent"):
            torch.compile(keywords(op), fullgraph=True)(**call)

    def function(tensor):
        return keywords(op)(**replaced(op, *place, lambda _: tensor))

    value = tree_leaves(good_call(op)[place[0]])[0]
    with pytest.raises(RuntimeError, match=f"{op}: the paged path has no autograd"):
        torch.func.jvp(function, (value,), (torch.ones_like(value),))


def test_a_level_without_tangents_and_inference_mode_are_no_obstacle():
    call = good_call("paged_attention")
    expected = pagedkv_ops.paged_attention(**call)
    with forward_ad.dual_level():
        torch.testing.assert_close(pagedkv_ops.paged_attention(**call), expected, rtol=0, atol=0)
        with torch.inference_mode():
            out = pagedkv_ops.paged_attention(**replaced("paged_attention", "query", None, dual))
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
