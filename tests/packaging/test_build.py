"""Building: without a compiler it says what to install; a source distribution holds everything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(tmp_path, **environment):
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    env = {**os.environ, **environment}
    return subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_missing_compiler_is_named(tmp_path):
    result = build(tmp_path, CXX="no-such-compiler")
    assert result.returncode != 0
    assert "needs a C++20 compiler" in result.stderr
    assert "'no-such-compiler' was not found. Install GCC 12 or Clang 14 or later" in result.stderr


def test_an_empty_cxx_means_the_default_compiler(tmp_path):
    result = build(tmp_path, CXX="", PATH=str(tmp_path))
    assert result.returncode != 0
    name = re.search(r"and '(.*)' was not found", result.stderr)
    assert name
    assert name.group(1).endswith(("++", "cc"))


def test_a_source_distribution_holds_the_repository(tmp_path):
    """Also tests, documents, examples and headers: CI builds the wheel from it and runs the tests that it brings."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no checkout of the repository")
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)], cwd=ROOT, check=True)
    held = (tmp_path / "pagedkv.egg-info" / "SOURCES.txt").read_text().splitlines()
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {name for name in listed if (ROOT / name).exists()} - set(held) == set()
