"""Kernels compiled for GPUs that are not there, by the assembler's report.

No spills, registers and shared memory within limits, the right instructions, and nothing that differs from the
checked-in ``benchmarks/triton_compile_report.md``. That table holds every kernel and configuration and says which
sources it is of; here every kernel is compiled anew, and the attention that is nearest to its limits on each target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

import triton

from pagedkv_ops._triton import config
from pagedkv_ops._triton.tuned import TABLE
from tests.triton.worker import Kernels
from tools import compile_report, offline, tune

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "benchmarks" / "triton_compile_report.md"
ROWS = [(arch, name) for arch in compile_report.TARGETS for name in compile_report.cases(arch)]
_RICH = "softcap alibi sinks lse splits"
_NEAREST = [f"attention prefill bfloat16 D=128 {_RICH}", f"attention append float32 D=256 {_RICH}"]
_DECODE = [f"attention decode bfloat16 D=128 {_RICH}", f"attention decode float32 D=256 {_RICH}"]
SAMPLE = [
    (arch, name)
    for arch, name in ROWS
    if name in _NEAREST
    or (arch == "sm_90" and (name in _DECODE or not name.startswith("attention")))
    or (arch == "gfx942" or (arch == "gfx1100" and name in ("combine bfloat16 D=128", "write_kv bfloat16")))
]


def checked_in_rows() -> dict[tuple[str, str], str]:
    rows = (line for line in REPORT.read_text().splitlines() if line.startswith(("| sm_", "| small", "| gfx")))
    return {tuple(cell.strip() for cell in row.split("|")[1:3]): row for row in rows}  # type: ignore[misc]


@pytest.mark.parametrize(("arch", "name"), SAMPLE)
def test_compiles_without_problems_into_what_the_table_says(compiler: Kernels, arch: str, name: str) -> None:
    row, problems = compiler.run(compile_report.row_of, arch, name)
    assert not problems
    if f"by Triton {triton.__version__}:" in REPORT.read_text():  # another assembler may well use other registers
        assert row == checked_in_rows().get((arch, name)), (
            f"the table is out of date: python -m tools.compile_report --write {REPORT.name}"
        )


def test_the_table_has_every_row_and_is_of_these_sources() -> None:
    assert list(checked_in_rows()) == ROWS
    assert f"sources {compile_report.digest()}." in REPORT.read_text(), "make report"


def _specialised(arch: str, name: str) -> tuple[list[Any], list[Any]]:
    """(Type, whether a multiple of 16) of every argument, by Triton's launcher and by the offline compilation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    launch = compile_report.launch_of(arch, name)
    backend = make_backend(GPUTarget("cuda", compile_report.TARGETS[arch].capability, 32))
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    specialised = binder(*launch.args, **launch.meta)[1]
    source = offline._source(launch)
    launcher, compiled = [], []
    for i, (parameter, (kind, key)) in enumerate(zip(launch.kernel.params, specialised, strict=True)):
        parts = zip(kind, key, strict=True) if isinstance(kind, tuple) else [(kind, key)]
        launcher += [(part, part != "constexpr" and key == "D") for part, key in parts]
        kinds = source.signature[parameter.name]
        paths = [((i, j), part) for j, part in enumerate(kinds)] if isinstance(kinds, tuple) else [((i,), kinds)]
        compiled += [(part, path in source.attrs) for path, part in paths]
    return launcher, compiled


@pytest.mark.parametrize("name", list(compile_report.cases("sm_90")))
def test_the_launcher_would_compile_the_same(compiler: Kernels, name: str) -> None:
    launcher, compiled = compiler.run(_specialised, "sm_90", name)
    assert compiled == launcher


def _float_instructions(arch: str, names: list[str]) -> list[dict[str, int]]:
    launches = [compile_report.launch_of(arch, name) for name in names]
    capability = compile_report.TARGETS[arch].capability
    return [offline.float_instructions(offline.compile_launch(launch, capability)) for launch in launches]


def test_one_split_uses_the_same_arithmetic_for_decode_and_prefill(compiler: Kernels) -> None:
    """Two kernels, one per way of cutting rows into tiles: the same bits need the same floating-point instructions."""
    names = [f"attention {kind} bfloat16 D=128 num_splits=1" for kind in ("decode", "prefill")]
    decode, prefill = compiler.run(_float_instructions, "sm_90", names)
    assert any(name.startswith("HMMA") for name in decode)
    assert decode == prefill


def _fused_products(arch: str, name: str, fusion: bool) -> int:
    launch = compile_report.launch_of(arch, name)
    assert launch.meta["enable_fp_fusion"]
    compiled = offline.compile_launch(launch._replace(meta=launch.meta | {"enable_fp_fusion": fusion}), 90)
    return offline.float_instructions(compiled).get("FFMA", 0)


def test_the_fusion_of_a_launch_reaches_the_machine_code(compiler: Kernels) -> None:
    without, fused = (compiler.run(_fused_products, "sm_90", "combine bfloat16 D=128", on) for on in (False, True))
    assert fused > without


def _ptx(arch: str, name: str) -> str:
    return offline.compile_launch(compile_report.launch_of(arch, name), compile_report.TARGETS[arch].capability).asm[
        "ptx"
    ]


@pytest.mark.parametrize(
    "name", ["combine bfloat16 D=128", *(f"attention {kind} bfloat16 D=128" for kind in ("decode", "prefill"))]
)
def test_maxima_drop_nan_when_compiled_and_comparisons_keep_it(compiler: Kernels, name: str) -> None:
    """``_triton/README.md`` says why either is right; the maxima of the interpreter keep NaN."""
    ptx = compiler.run(_ptx, "sm_90", name)
    assert "max.f32" in ptx
    assert "max.NaN" not in ptx
    assert "setp.neu.f32" in ptx  # denominator != 0, true for NaN


@pytest.mark.parametrize(("backend", "arch"), [("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", "gfx942")])
def test_no_matrix_product_is_below_the_smallest_of_a_target(backend: str, arch: int | str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.language import block_type, float16, float32

    codegen = make_backend(GPUTarget(backend, arch, 64 if backend == "hip" else 32))
    smallest = codegen.get_codegen_implementation(codegen.parse_options({}))["min_dot_size"]
    for dtype in (float16, float32):
        m, n, k = smallest(block_type(dtype, [16, 16]), block_type(dtype, [16, 16]))
        for block_m, block_n, *_ in TABLE.values():
            assert min(block_m, config.padded(1)) >= m  # rows are as many as a group of heads has, from 16 on
            assert min(block_n, config.padded(1)) >= max(n, k)  # q.k sums over a head, p.v over a tile's keys


def test_problems_are_found() -> None:
    """The judgement itself: a report of a bad kernel names each fault."""
    launch = compile_report.launch_of("sm_90", "attention prefill bfloat16 D=128")
    good = compile_report.Report(100, 1000, 0, 0, 8, "HGMMA", 8, 8, 8, 1000)
    judge = lambda **faults: compile_report.problems(  # noqa: E731
        "sm_90", "attention prefill bfloat16 D=128", launch, good._replace(**faults)
    )
    assert judge() == []
    assert "spills" in judge(local_memory_instructions=1)[0]
    assert "registers" in judge(registers=256)[0]
    assert "shared memory" in judge(shared_bytes=300_000)[0]
    assert "HGMMA expected, HMMA found" in judge(tensor_core="HMMA")[0]
    assert "asynchronous" in judge(async_copies=0)[0]


def test_the_tuned_table_is_what_the_tuner_writes() -> None:
    assert (ROOT / "pagedkv_ops" / "_triton" / "tuned.py").read_text() == tune.render(TABLE)


def test_every_architecture_has_every_row() -> None:
    keys = {arch: {key[1:] for key in TABLE if key[0] == arch} for arch in compile_report.NVIDIA}
    assert all(rows == keys["sm_80"] for rows in keys.values())
