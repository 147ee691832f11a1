"""What patch, PagedCache and a patched model refuse by name, and the names that their texts point to."""

from __future__ import annotations

import doctest
import inspect

from models import tiny

import pagedkv
import pagedkv.hf


def test_patch_and_pool_are_functions_and_pool_class_is_public():
    assert inspect.isfunction(pagedkv.hf.patch)
    assert inspect.isfunction(pagedkv.hf.pool)
    assert inspect.isclass(pagedkv.hf.Pool)
    assert pagedkv.hf.patch is pagedkv.patch
    assert pagedkv.hf.layer_modes is pagedkv.layer_modes


def test_layer_modes_are_shown_by_the_pool():
    model = tiny("llama")
    pagedkv.patch(model, num_blocks=8)
    assert pagedkv.layer_modes(model) == ["paged"] * 3
    assert repr(pagedkv.pool(model)).endswith(", layers 3 paged)")


def test_examples_in_docstrings_run(capsys):
    doctest.run_docstring_examples(pagedkv.layer_modes, {})
    assert capsys.readouterr().out == ""
