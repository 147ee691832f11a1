"""The environment that CI makes for Torch-TensorRT fails, and does not skip, where that is missing or can not load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("broken", [True, False], ids=["can_not_load", "missing"])
def test_a_required_torch_tensorrt(tmp_path: Path, broken: bool) -> None:
    if broken:
        (tmp_path / "torch_tensorrt.py").write_text("raise ImportError('a library of it is missing')\n")
    elif importlib.util.find_spec("torch_tensorrt") is not None:
        pytest.skip("torch_tensorrt is installed here")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PAGEDKV_REQUIRE_TENSORRT": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/tensorrt/test_install.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 1, done.stdout
    assert "ERROR tests/tensorrt/test_install.py::test_install_is_idempotent" in done.stdout
