"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import pagedkv
import pagedkv_ops

FOLDERS = [Path(package.__file__).parent for package in (pagedkv_ops, pagedkv)]
MODULES = sorted(
    ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    for folder in FOLDERS
    for file in folder.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0
