"""Importing pagedkv_ops: what it loads, twice, under two paths, in a child process, without Triton or a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedkv
import pagedkv_ops
from pagedkv_ops.schema import SCHEMAS

PACKAGE = Path(pagedkv_ops.__file__).parent

USE = """
import torch
def use(pagedkv_ops):
    cache = torch.full((2, 4, 1, 2), float("nan"))
    pagedkv_ops.write_kv(torch.ones(1, 1, 2), torch.ones(1, 1, 2), cache, value := cache.clone(), torch.tensor([4]))
    out = pagedkv_ops.paged_attention(torch.ones(1, 1, 2), cache, value, torch.tensor([[1]]), torch.tensor([1]))
    assert out.tolist() == [[[1.0, 1.0]]], out
"""


PATHS = os.pathsep.join([str(PACKAGE.parent), str(Path(pagedkv.__file__).parents[1])])


def run(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or not check, done.stderr
    return done


def python(code: str, **environment: str) -> str:
    return run("-c", code, **environment).stdout


def test_loads_no_module_but_its_own_beyond_torch():
    """Not numpy, transformers or triton unless torch itself has loaded them."""
    code = "import sys, torch; before = set(sys.modules); import pagedkv_ops; print(*(set(sys.modules) - before))"
    loaded = python(code).split()
    assert {name.partition(".")[0] for name in loaded} <= {"pagedkv_ops"} | set(sys.stdlib_module_names)
    assert "pagedkv_ops.reference" in loaded
    assert "pagedkv_ops._triton" not in loaded


def test_the_user_package_loads_nothing_before_it_is_used():
    """Not torch or numpy, and not importlib.metadata, which brings the email package and costs more than all else."""
    out = python("import sys; import pagedkv; print(*sys.modules)", PYTHONPATH=PATHS).split()
    assert "pagedkv" in out
    assert not {"torch", "numpy", "importlib.metadata", "email"} & set(out)


def test_the_ops_need_torch_alone():
    """Without numpy the ops work, compiled too."""
    python(
        "import sys; sys.modules['numpy'] = None  # as if it were not installed\n"
        + USE
        + """
import pagedkv_ops
use(pagedkv_ops)
torch.compile(use, backend="eager")(pagedkv_ops)
"""
    )


NUMPY = """
import sys, time

class Numpy:
    # in front of all finders: numpy takes its time, or is not there
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            Numpy.asked += 1
            if MISSING:
                raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
            time.sleep(0.2)

sys.meta_path.insert(0, Numpy())
import pagedkv.manager
assert Numpy.asked == 0 and "numpy" not in sys.modules
managers = [pagedkv.KVCacheManager(200, 4, sliding_window=window) for window in (None, 30)]
assert Numpy.asked == 1 and ("numpy" in sys.modules) is not MISSING
import torch
asked, before = Numpy.asked, set(sys.modules)
import pagedkv_ops
assert Numpy.asked == asked and not any(name.startswith("numpy") for name in set(sys.modules) - before)
for manager in managers:
    for name in "ab":
        manager.add(name, list(range(100)))
        print(manager.allocate_slots(name).slots)
        manager.commit(name, 100 - manager.num_computed_tokens(name))
        manager.check_integrity()
    manager.free("a")
    print(manager.stats())
"""


def test_a_slow_or_missing_numpy():
    """No import asks for it (but torch's own); the first manager does once, and works without."""
    slow, missing = (python(NUMPY.replace("MISSING", str(missing)), PYTHONPATH=PATHS) for missing in (False, True))
    assert slow == missing
    assert len(slow.splitlines()) == 6


def test_the_user_package_resolves_every_name_it_lists():
    """Also modules that were not imported before, so that ``import pagedkv`` is all that examples need."""
    code = """
import pagedkv
for name in dir(pagedkv):
    getattr(pagedkv, name)
pagedkv.integrations.torch_tensorrt.install
assert pagedkv.__version__ != "" and not hasattr(pagedkv, "transformers") and not hasattr(pagedkv.integrations, "os")
"""
    python(code, PYTHONPATH=PATHS)


def test_second_imports_keep_the_ops():
    """Reloaded, with every module forgotten, and under another name, as when a copy lies on the path too."""
    python(
        USE
        + f"""
import importlib, importlib.util, sys
import pagedkv_ops
first = torch.ops.pagedkv.write_kv.default
use(importlib.reload(pagedkv_ops))
for name in [n for n in sys.modules if n.startswith("pagedkv_ops")]:
    del sys.modules[name]
again = importlib.import_module("pagedkv_ops")
assert again is not pagedkv_ops
spec = importlib.util.spec_from_file_location(
    "other_ops", {str(PACKAGE / "__init__.py")!r}, submodule_search_locations=[{str(PACKAGE)!r}]
)
other = importlib.util.module_from_spec(spec)
sys.modules["other_ops"] = other
spec.loader.exec_module(other)
for module in (again, pagedkv_ops, other):
    use(module)
    assert module.backends() == pagedkv_ops.backends()
assert torch.ops.pagedkv.write_kv.default is first
"""
    )


def test_child_processes(tmp_path):
    """A script whose children use the ops, after the parent has."""
    script = tmp_path / "script.py"
    script.write_text(
        USE
        + """
import multiprocessing
import pagedkv_ops

def child():
    use(pagedkv_ops)

if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    use(pagedkv_ops)
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start(); process.join()
        assert process.exitcode == 0, (method, process.exitcode)
"""
    )
    run(str(script))


def test_without_triton_the_cpu_ops_work_and_the_cuda_backend_names_what_is_missing():
    out = python(
        "import sys; sys.modules['triton'] = None  # as if it were not installed\n"
        + USE
        + """
import pagedkv_ops
use(pagedkv_ops)
print(pagedkv_ops.backends()["cuda"])
try:
    sys.modules["pagedkv_ops.backends"]._cuda_op("write_kv")
except RuntimeError as error:
    print(error)
"""
    )
    report, error = out.splitlines()
    assert report.startswith("unavailable: ")
    assert "triton" in report
    assert error.startswith("write_kv: no CUDA implementation: ")
    assert "pip install" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_report_says_so():
    assert pagedkv_ops.backends()["cuda"].startswith("unavailable: ")


def test_every_op_has_a_cuda_kernel_registered():
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{name}", "CUDA"), name


def test_missing_extension_says_how_to_build_it(tmp_path):
    """A source tree that was not built: the error names the file and the command."""
    for source in PACKAGE.glob("*.py"):
        (tmp_path / "pagedkv_ops").mkdir(exist_ok=True)
        (tmp_path / "pagedkv_ops" / source.name).write_text(source.read_text())
    done = run(
        "-c",
        "import sys; del sys.path[0]; import pagedkv_ops",
        check=False,
        PYTHONPATH=str(tmp_path),
        PAGEDKV_CPU="c++",
    )
    assert done.returncode != 0
    assert "the compiled extension _C.abi3.so is missing; build it with `pip install" in done.stderr


def test_reference_backend_can_be_asked_for():
    out = python(
        USE + "import pagedkv_ops\nuse(pagedkv_ops)\nprint(pagedkv_ops.backends()['cpu'])", PAGEDKV_CPU="reference"
    )
    assert out.strip() == "reference"


def test_unknown_backend_is_an_error():
    done = run("-c", "import pagedkv_ops", check=False, PAGEDKV_CPU="fast")
    assert "PAGEDKV_CPU must be c++ or reference, got fast" in done.stderr
