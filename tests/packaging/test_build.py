"""Building without a compiler says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_missing_compiler_is_named(tmp_path):
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    env = {**os.environ, "CXX": "no-such-compiler"}
    result = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "needs a C++20 compiler" in result.stderr
    assert "'no-such-compiler' was not found. Install GCC 12 or Clang 14 or later" in result.stderr
