"""What autograd sees of the ops: inputs it can not follow are refused, writes count in the tensors' versions."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.autograd import forward_ad

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

from .bad_inputs import good_call

MUTABLE = [name for name in SCHEMAS if getattr(torch.ops.pagedkv, name).default._schema.is_mutable]


def tensors_of(call):
    """(argument, index in its list or None, tensor) of every tensor of a call."""
    for name, value in call.items():
        for index, tensor in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(tensor, torch.Tensor):
                yield name, index, tensor


def float_inputs(op):
    return [(name, index) for name, index, tensor in tensors_of(good_call(op)) if tensor.is_floating_point()]


def replaced(op, name, index, change):
    call = good_call(op)
    if index is None:
        call[name] = change(call[name])
    else:
        call[name] = [change(t) if i == index else t for i, t in enumerate(call[name])]
    return call


def versions(op, call):
    """Versions of the written tensors, and of the others."""
    writes = {a.name for a in getattr(torch.ops.pagedkv, op).default._schema.arguments if a.is_write}
    written = [tensor._version for name, _, tensor in tensors_of(call) if name in writes]
    return written, [tensor._version for name, _, tensor in tensors_of(call) if name not in writes]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", SCHEMAS)
def test_versions_of_written_arguments_grow_and_no_others(op, mode, run):
    call = good_call(op)
    with mode():
        before, others = versions(op, call)
        assert bool(before) == (op in MUTABLE)
        run(lambda **kwargs: getattr(pagedkv_ops, op)(**kwargs), **call)
        after, others_after = versions(op, call)
    assert all(now > then for now, then in zip(after, before, strict=True))
    assert others_after == others


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", MUTABLE)
def test_versions_grow_before_a_cuda_launch(op, mode, monkeypatch):
    """The launchers are Python: under inference_mode they have no guard above them."""
    call = good_call(op)
    backends = sys.modules["pagedkv_ops.backends"]  # the package's function of this name hides the module
    monkeypatch.setattr(backends, "_launcher", lambda name: lambda *args, **kwargs: None)
    schema = getattr(torch.ops.pagedkv, op).default._schema
    options = dict(call)
    args = [options.pop(a.name) for a in schema.arguments if not a.kwarg_only and a.name in options]
    with mode():
        before, others = versions(op, call)
        backends._cuda_op(op, *args, **options)
        after, others_after = versions(op, call)
    assert [now - then for now, then in zip(after, before, strict=True)] == [mode is torch.inference_mode] * len(before)
    assert others_after == others


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", MUTABLE)
def test_backward_of_a_product_that_saved_a_written_tensor_fails(op, mode, run):
    """y = (cache * w).sum(), then a write, then y.backward(): torch's own error, no wrong gradient."""
    call = good_call(op)
    writes = {a.name for a in getattr(torch.ops.pagedkv, op).default._schema.arguments if a.is_write}
    for name, _, tensor in list(tensors_of(call)):
        if name in writes:
            weight = torch.ones_like(tensor, requires_grad=True)
            y = (tensor * weight).sum()
            with mode():
                run(lambda **kwargs: getattr(pagedkv_ops, op)(**kwargs), **call)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


@pytest.mark.parametrize("op", SCHEMAS)
def test_inference_mode_calls_no_python(op):
    """It skips Autograd, but a Python kernel on ADInplaceOrView would run there, and cost a write 5 us."""
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{op}", "ADInplaceOrView")


@pytest.mark.parametrize("op", MUTABLE)
def test_inference_tensors_have_no_version_and_can_be_written(op):
    with torch.inference_mode():
        call = good_call(op)
        getattr(pagedkv_ops, op)(**call)
    with torch.no_grad():
        getattr(pagedkv_ops, op)(**call)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(("op", "name", "index"), [(op, *place) for op in SCHEMAS for place in float_inputs(op)])
def test_dual_tensor_is_refused(op, name, index, mode, run):
    """no_grad does not end forward-mode AD: a result without a tangent would be a derivative of 0."""
    with forward_ad.dual_level(), mode():
        call = replaced(op, name, index, lambda t: forward_ad.make_dual(t, torch.ones_like(t)))
        with pytest.raises(Exception, match=f"{op}: the paged path has no autograd, but .* carries a tangent"):
            run(lambda **kwargs: getattr(pagedkv_ops, op)(**kwargs), **call)


@pytest.mark.parametrize("op", SCHEMAS)
def test_jvp_is_refused(op):
    name, index = float_inputs(op)[0]

    def function(tensor):
        return getattr(pagedkv_ops, op)(**replaced(op, name, index, lambda _: tensor))

    value = good_call(op)[name] if index is None else good_call(op)[name][index]
    with pytest.raises(RuntimeError, match=f"{op}: the paged path has no autograd"):
        torch.func.jvp(function, (value,), (torch.ones_like(value),))


def test_a_level_without_tangents_and_inference_mode_are_no_obstacle():
    call = good_call("paged_attention")
    expected = pagedkv_ops.paged_attention(**call)
    with forward_ad.dual_level():
        torch.testing.assert_close(pagedkv_ops.paged_attention(**call), expected, rtol=0, atol=0)
        dual = replaced("paged_attention", "query", None, lambda t: forward_ad.make_dual(t, torch.ones_like(t)))
        with torch.inference_mode():
            torch.testing.assert_close(pagedkv_ops.paged_attention(**dual), expected, rtol=0, atol=0)
