"""Every bad input: one clear error, the same from the op, its fake kernel and the reference, and nothing changed."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.schema import SCHEMAS

from .bad_inputs import SHAPES, VALUES, bad_call, changes, float_tensors, good_call, replaced

BOTH = pytest.mark.parametrize("module", [pagedkv_ops, reference], ids=["op", "reference"])
OPS = pytest.mark.parametrize("op", SCHEMAS)


def table(*tables):
    rows = [(op, *row) for op in SCHEMAS for bad in tables for row in bad[op]]
    return pytest.mark.parametrize(("op", "text", "change"), rows, ids=[f"{op}: {text}" for op, text, _ in rows])


def error(function, call) -> str:
    """The first line of the RuntimeError that the call raises, which changes no tensor; a C++ stack may follow it."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError) as caught:
        function(**call)
    torch.testing.assert_close([t.detach() for t in tensors], before, rtol=0, atol=0, equal_nan=True)
    return str(caught.value).splitlines()[0]


@OPS
def test_good_call_works(op):
    getattr(pagedkv_ops, op)(**good_call(op))
    getattr(reference, op)(**good_call(op))


@BOTH
@table(SHAPES, VALUES)
def test_text_and_nothing_changed(module, op, text, change):
    assert error(getattr(module, op), bad_call(op, text, change)) == f"{op}: {text}"


@table(SHAPES)
def test_fake_kernel_says_the_same(op, text, change):
    call = bad_call(op, text, change)
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, call)
        with pytest.raises(RuntimeError) as caught:
            getattr(pagedkv_ops, op)(**fake)
    assert str(caught.value).splitlines()[0] == f"{op}: {text}"


@OPS
def test_every_argument_has_a_bad_input(op):
    """The tables name each argument at least once, save those that no value can make wrong."""
    arguments = {argument.name for argument in getattr(torch.ops.pagedkv, op).default._schema.arguments}
    assert arguments - {name for row in SHAPES[op] + VALUES[op] for name in changes(*row)} <= {"causal"}


@OPS
def test_input_that_requires_grad(op):
    """The paged path has no autograd; without an error a written cache would require grad from then on."""
    for place in float_tensors(op):
        call = replaced(op, *place, lambda tensor: tensor.clone().requires_grad_())
        text = error(getattr(pagedkv_ops, op), call)
        assert text.startswith(f"{op}: the paged path has no autograd, but an input requires grad")
        assert "torch.no_grad()" in text
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                getattr(pagedkv_ops, op)(**call)


def test_requires_grad_error_inside_a_compiled_function():
    call = good_call("paged_attention")
    call["query"] = call["query"].requires_grad_()
    compiled = torch.compile(lambda **kwargs: pagedkv_ops.paged_attention(**kwargs), fullgraph=True)
    with pytest.raises(Exception, match="the paged path has no autograd"):
        compiled(**call)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**call), pagedkv_ops.paged_attention(**call))


LAZY = {"negated": torch._neg_view, "conjugated": lambda tensor: torch.complex(tensor, tensor).conj()}


@pytest.mark.parametrize("kind", LAZY)
@OPS
def test_lazy_views_are_not_written_and_are_read_as_they_show(op, kind):
    """torch would run the op on a copy: it failed when it copied back, with one of two caches written."""
    writes = {a.name for a in getattr(torch.ops.pagedkv, op).default._schema.arguments if a.is_write}
    for name, index in float_tensors(op):
        call = replaced(op, name, index, LAZY[kind])
        if name in writes:
            label = name if index is None else f"{name}[{index}]"
            text = f"{op}: {label} must hold the values that it shows, got a lazily {kind} view"
            assert error(getattr(pagedkv_ops, op), call) == text
        elif kind == "negated":
            out = getattr(pagedkv_ops, op)(**call)
            expected = getattr(pagedkv_ops, op)(**{**call, name: call[name].resolve_neg()})
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
