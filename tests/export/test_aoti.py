"""Packages of examples/export_aoti.py run in a fresh Python process and in the C++ program of examples/cpp."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20  # past the end of a block
TOKENS = ["3", "1", "4"]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def export_aoti(*arguments: str | Path) -> str:
    """What the example prints, run in this process: importing torch takes as long as a third of a compilation."""
    command = ["export_aoti.py", *map(str, arguments), "--steps", str(STEPS), "--tokens", *TOKENS]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", command)
        runpy.run_path(str(EXAMPLES / "export_aoti.py"), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Packages with caches as inputs and as buffers, and the tokens of the eager model."""
    folder = tmp_path_factory.mktemp("aoti")
    paths = {caches: folder / f"{caches}.pt2" for caches in ("inputs", "buffers")}
    return [(path, export_aoti(path, "--caches", caches)) for caches, path in paths.items()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp, built against the installed torch and this package."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=search)
    assert cmake, "the C++ example needs cmake: pip install cmake"
    build = tmp_path_factory.mktemp("cpp")
    prefixes = f"{torch.utils.cmake_prefix_path};{pagedkv_ops.cmake_prefix_path}"
    run(cmake, "-S", EXAMPLES / "cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={prefixes}", "-DCMAKE_BUILD_TYPE=Release")
    run(cmake, "--build", build)
    return build / "decode"


def test_fresh_python_process(packages: list[tuple[Path, str]]) -> None:
    code = f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
    for path, tokens in packages:
        assert len(tokens.splitlines()) == STEPS
        assert len(set(tokens.splitlines())) > 2, "the tokens show nothing"
        arguments = ["export_aoti.py", str(path), "--run", "--steps", str(STEPS), "--tokens", *TOKENS]
        code += f"sys.argv = {arguments}\nrunpy.run_module('export_aoti', run_name='__main__')\n"
    assert run(sys.executable, "-c", code) == "".join(tokens for _, tokens in packages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("caches", ["inputs", "buffers"])
def test_fresh_python_process_on_cuda(tmp_path: Path, caches: str) -> None:
    path = tmp_path / "decoder.pt2"
    tokens = export_aoti(path, "--caches", caches, "--device", "cuda")
    assert export_aoti(path, "--run", "--device", "cuda") == tokens


def test_cpp_program(packages: list[tuple[Path, str]], program: Path) -> None:
    for path, tokens in packages:
        assert run(program, path, str(STEPS), *TOKENS) == tokens


def test_cpp_program_reports_errors(program: Path, tmp_path: Path) -> None:
    done = subprocess.run([program, tmp_path / "none.pt2", "2", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "none.pt2" in done.stderr


def test_cpp_definitions_equal_the_table() -> None:
    """The library for C++ programs defines, in a process without the Python package, what Python defines elsewhere."""
    library = Path(pagedkv_ops.cmake_prefix_path).parent / "_definitions.abi3.so"
    code = (
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        "schemas = torch._C._jit_get_all_schemas()\n"
        "print(*sorted(str(s) for s in schemas if s.name.startswith('pagedkv::')), sep='\\n')"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    in_python = sorted(str(getattr(torch.ops.pagedkv, name).default._schema) for name in SCHEMAS)
    assert done.stdout.splitlines() == in_python
