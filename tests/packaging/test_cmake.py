"""find_package(pagedkv): where it finds torch, and that it loads nothing of torch's own CMake package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pagedkv_ops

FAILS = 'message(FATAL_ERROR "CUDA cannot be found")'  # as beside a CUDA build of torch without a toolkit
SHOW = """
find_package(pagedkv REQUIRED)
get_target_property(libraries pagedkv::ops INTERFACE_LINK_LIBRARIES)
get_target_property(headers pagedkv::ops INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "libraries ${libraries}")
message(STATUS "headers ${headers}")
"""


def configure(folder: Path, lines: str, torch_config: str | None = FAILS) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert cmake, "needs cmake: pip install cmake"
    config = folder / "torch" / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    if torch_config is not None:
        config.write_text(torch_config)
    (folder / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.18)\nproject(program NONE)\n{lines}")
    prefixes = f"{config.parents[1]};{pagedkv_ops.cmake_prefix_path}"
    command = [cmake, "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefixes}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_torch_is_its_headers_and_libraries(tmp_path: Path) -> None:
    done = configure(tmp_path, SHOW)
    assert done.returncode == 0, done.stderr
    root = tmp_path / "torch"
    libraries = ";".join(str(root / "lib" / f"lib{name}.so") for name in ("torch", "torch_cpu", "c10"))
    assert f"-Wl,--no-as-needed;pagedkv::definitions;pagedkv::C;{libraries};-Wl,--as-needed\n" in done.stdout
    assert f"headers {root}/include;{root}/include/torch/csrc/api/include\n" in done.stdout


def test_a_torch_that_was_found_before_is_kept(tmp_path: Path) -> None:
    done = configure(tmp_path, "find_package(Torch REQUIRED)" + SHOW, "add_library(torch INTERFACE IMPORTED)")
    assert done.returncode == 0, done.stderr
    assert "pagedkv::C;torch;-Wl" in done.stdout
    assert str(tmp_path / "torch" / "lib") not in done.stdout


def test_a_missing_torch_is_named(tmp_path: Path) -> None:
    done = configure(tmp_path, SHOW, torch_config=None)
    assert done.returncode != 0
    assert "torch was not found: add the output of `python -c 'import torch;" in " ".join(done.stderr.split())
