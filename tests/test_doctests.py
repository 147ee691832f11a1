"""Examples in docstrings run, and every public op, function and class has one. Their ``model`` is a small Llama."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch
import transformers

import pagedkv
import pagedkv.hf
import pagedkv_ops

FOLDERS = [Path(package.__file__).parent for package in (pagedkv_ops, pagedkv)]
MODULES = sorted(
    ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    for folder in FOLDERS
    for file in folder.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=None,
    )
    return {"model": transformers.LlamaForCausalLM(config).eval(), "pagedkv": pagedkv, "torch": torch}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, names: dict[str, object]) -> None:
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS, extraglobs=names)
    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize("package", [pagedkv_ops, pagedkv, pagedkv.hf], ids=lambda package: package.__name__)
def test_everything_public_has_an_example(package: object) -> None:
    public = {name: getattr(package, name) for name in package.__all__}
    without = {name for name, value in public.items() if callable(value) and ">>> " not in (value.__doc__ or "")}
    assert {name for name in without if not name.endswith("Error")} == set()
