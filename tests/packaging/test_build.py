"""Building without a compiler says what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
