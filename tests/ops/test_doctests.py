"""Every public function shows an example, and it gives what it says."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import pagedkv_ops
from pagedkv_ops import arguments
from pagedkv_ops.schema import SCHEMAS

FUNCTIONS = [name for name in pagedkv_ops.__all__ if callable(getattr(pagedkv_ops, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name):
    function = getattr(pagedkv_ops, name)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(function, name, globs={"torch": torch, **vars(pagedkv_ops)})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_argument_has_a_line_of_its_own(name):
    function = getattr(pagedkv_ops, name)
    lines = [line.strip() for line in function.__doc__.splitlines()]
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
