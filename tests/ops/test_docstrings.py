"""What the docstrings of the ops promise to hold; tests/test_doctests.py runs their examples."""

from __future__ import annotations

import inspect

import pytest
import torch

import pagedkv_ops
from pagedkv_ops import arguments
from pagedkv_ops.schema import SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_argument_has_a_line_of_its_own_and_every_op_an_example(name):
    function = getattr(pagedkv_ops, name)
    lines = [line.strip() for line in function.__doc__.splitlines()]
    assert any(
        line.startswith(f">>> {name}(") or f" {name}(" in line for line in lines if line.startswith((">>>", "..."))
    )
    shown = inspect.signature(function).parameters
    for argument in getattr(torch.ops.pagedkv, name).default._schema.arguments:
        if argument.name in shown:
            assert any(line.startswith(f"{argument.name}: ") for line in lines), argument.name
        else:
            assert "options" in shown, argument.name


def test_attention_is_listed_alike_for_torch_for_people_and_for_implementations():
    """Names, order and defaults of the schema, the public function and the dataclass that the implementations take."""
    schema = torch.ops.pagedkv.paged_attention.default._schema.arguments
    expected = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema]
    for function in (pagedkv_ops.paged_attention, arguments.Attention):
        parameters = inspect.signature(function).parameters.values()
        assert [(p.name, p.default) for p in parameters] == expected
