"""``python -m tools.compile_report``: what the assembler makes of every kernel, without a device.

Prints a table and exits with 1 where a kernel spills registers, exceeds shared memory, or lacks the tensor-core
instructions or 128-bit accesses that it needs. ``--write FILE`` keeps the table, ``--only TEXT`` takes some rows.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor

from pagedkv_ops._triton import attention, blocks, config, gathering, states, writing
from pagedkv_ops._triton.launch import Launch, recording
from pagedkv_ops._triton.tuned import TABLE
from pagedkv_ops.arguments import Attention

from .offline import Report, compile_launch, inspect


class Target(NamedTuple):
    capability: int | str  # 90 of sm_90, or an AMD chip
    shared_bytes: int  # the most that one thread block may have
    wide_instruction: str  # tensor-core instruction of tiles of 64 rows and more


TARGETS = {
    "sm_80": Target(80, 163 << 10, "HMMA"),
    "sm_90": Target(90, 227 << 10, "HGMMA"),
    "sm_100": Target(100, 227 << 10, "UTCHMMA"),
    "small": Target(89, 99 << 10, "HMMA"),
    "gfx942": Target("gfx942", 64 << 10, ""),  # all but attention, which is refused there
    "gfx1100": Target("gfx1100", 64 << 10, ""),
}
NVIDIA = ("sm_80", "sm_90", "sm_100", "small")
_RICH = " softcap alibi sinks lse splits"
BOXED = (128, 64, 8, 3, 1, True)
_NARROW = ("combine", "write_kv bfloat16 to int8", "write_kv bfloat16 to float8")  # store 128 or 256 bytes a row
_REGISTERS = 65536  # of a multiprocessor


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _caches(dtype: torch.dtype, head_size: int, num_kv_heads: int = 8) -> list[Tensor]:
    return [_meta(4096, 16, num_kv_heads, head_size, dtype=dtype) for _ in range(2)]


def _attend(
    kind: str,
    dtype: torch.dtype,
    head_size: int,
    rich: bool,
    num_splits: int = 0,
    window_left: int = -1,
    far: bool = False,
    batch: int = 0,
    caches: list[Tensor] | None = None,
    stored: torch.dtype | None = None,
    num_kv_heads: int = 8,
) -> None:
    """Decode of 64 sequences, which "append" writes too, or a prefill of four.

    ``rich`` has the options and as many query rows as fit a tile; ``far`` strides that need 64 bits, and a softcap that
    needs its series; ``stored`` a quantised type, with a scale of each token and head.
    """
    batch = batch or (4 if kind == "prefill" else 64)
    num_tokens = 8192 if kind == "prefill" else batch
    heads, num_kv_heads = (64, 1) if rich and kind != "prefill" else (32, num_kv_heads)
    options, new = {}, None
    if kind == "append":
        token = _meta(num_tokens, num_kv_heads, head_size, dtype=dtype)
        new = (token, token, _meta(num_tokens, dtype=torch.int64))
    if rich:
        options |= {"softcap": 300.0 if far else 30.0, "alibi_slopes": _meta(heads), "sinks": _meta(heads)}
        num_splits = num_splits or 4
    caches = caches or _caches(stored or dtype, head_size, num_kv_heads)
    if stored is not None:
        options |= {name: _scales(num_kv_heads) for name in ("k_scale", "v_scale")}
    if far:
        caches = [cache.as_strided(cache.shape, (2**32, 2**28, head_size, 1)) for cache in caches]
    arguments = Attention(
        _meta(num_tokens, heads, head_size, dtype=dtype),
        *caches,
        _meta(batch, 512, dtype=torch.int32),
        _meta(batch, dtype=torch.int32),
        _meta(batch + 1, dtype=torch.int32) if kind == "prefill" or (rich and kind == "decode") else None,
        num_splits=num_splits,
        window_left=window_left,
        **options,
    )
    attention.attend(arguments, rich, new)


def _scales(num_kv_heads: int) -> Tensor:
    """[N, S, Hkv], head-major as those of `PagedKVCache`."""
    return _meta(4096, num_kv_heads, 16, dtype=torch.float32).transpose(1, 2)


def _candidate(block_size: int, row: tuple[int, ...]) -> None:
    """A prefill over head-major pages, with a row that the tuner measures beside that of the table."""
    caches = [_meta(4096, 8, block_size, 128).transpose(1, 2) for _ in range(2)]
    with mock.patch.dict(TABLE, {("sm_90", "prefill", 2, 128): row}):
        _attend("prefill", torch.bfloat16, 128, False, caches=caches)


def _write(dtype: torch.dtype, stored: torch.dtype = torch.bfloat16) -> None:
    new = [_meta(64, 8, 128, dtype=dtype) for _ in range(2)]
    scales = () if stored == torch.bfloat16 else (None, None, _scales(8), _scales(8))
    writing.store(*new, *_caches(stored, 128), _meta(64, dtype=torch.int64), *scales)


def _merge() -> None:
    lse = _meta(64, 32, dtype=torch.float32)
    states.merge_states(_meta(64, 32, 128), lse, _meta(64, 32, 128), lse)


def _copy() -> None:
    blocks.copy_blocks(_caches(torch.bfloat16, 128), _meta(64, 2, dtype=torch.int64))


def _gather(stored: torch.dtype = torch.bfloat16) -> None:
    indices = (_meta(64, 512, dtype=torch.int32), _meta(64, dtype=torch.int32))
    options = {} if stored == torch.bfloat16 else {"scale": _scales(8), "dtype": torch.bfloat16}
    gathering.gather_kv(_caches(stored, 128)[0], *indices, 8192, **options)


def cases(arch: str) -> dict[str, tuple[Callable[[], None], int]]:
    """Row name -> call that launches, and which of its launches is meant."""
    rows: dict[str, tuple[Callable[[], None], int]] = {}
    for table_arch, kind, itemsize, width in TABLE:
        if table_arch == arch:
            dtype = torch.bfloat16 if itemsize == 2 else torch.float32
            for case in (kind, "append") if kind == "decode" and width <= attention._WIDEST_FUSED else (kind,):
                for rich in (False, True):
                    name = f"attention {case} {str(dtype)[6:]} D={width}{_RICH if rich else ''}"
                    rows[name] = partial(_attend, case, dtype, width, rich), 0
    for stored in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2) if arch in NVIDIA else ():
        for kind in ("decode", "prefill"):
            name = f"attention {kind} bfloat16 over {str(stored)[6:]} D=128"
            rows[name] = partial(_attend, kind, torch.bfloat16, 128, False, stored=stored), 0
    if arch in NVIDIA:  # 8 query heads for a KV head, as of gpt-oss
        rows["attention decode bfloat16 D=64 group 8"] = (
            partial(_attend, "decode", torch.bfloat16, 64, False, num_kv_heads=4),
            0,
        )
    if arch == "small":  # differs by its configurations alone
        return rows
    for kind in ("decode", "append", "prefill") if arch in NVIDIA else ():
        rows[f"attention {kind} float16 D=128"] = partial(_attend, kind, torch.float16, 128, False), 0
        rows[f"attention {kind} bfloat16 D=80"] = partial(_attend, kind, torch.bfloat16, 80, False), 0
        if kind != "append":  # it never takes one split
            name = f"attention {kind} bfloat16 D=128 num_splits=1"
            rows[name] = partial(_attend, kind, torch.bfloat16, 128, False, 1), 0
        name = f"attention {kind} bfloat16 D=128{_RICH} window"
        rows[name] = partial(_attend, kind, torch.bfloat16, 128, True, window_left=1000), 0
    if arch in NVIDIA:
        name = f"attention decode bfloat16 D=128{_RICH} far"
        rows[name] = partial(_attend, "decode", torch.bfloat16, 128, True, far=True), 0
        rows["attention decode bfloat16 D=576"] = partial(_attend, "decode", torch.bfloat16, 576, False), 0
        name = "attention decode bfloat16 D=128 4096 sequences"
        rows[name] = partial(_attend, "decode", torch.bfloat16, 128, False, batch=4096), 0
    if arch == "sm_90":
        for block_size, row in ((16, (128, 64, 8, 3, 1)), (16, (64, 128, 8, 2, 1)), (16, BOXED), (64, BOXED)):
            name = f"attention prefill bfloat16 D=128 candidate{f' boxes of {block_size}' if row == BOXED else ''}"
            rows[f"{name} {row[0]}x{row[1]}"] = partial(_candidate, block_size, row), 0
    rows["combine bfloat16 D=128"] = partial(_attend, "decode", torch.bfloat16, 128, False), 1
    rows["write_kv bfloat16"] = partial(_write, torch.bfloat16), 0
    rows["write_kv float32 to bfloat16"] = partial(_write, torch.float32), 0
    for stored in (torch.int8, torch.float8_e4m3fn):
        rows[f"write_kv bfloat16 to {str(stored)[6:]}"] = partial(_write, torch.bfloat16, stored), 0
        rows[f"gather_kv {str(stored)[6:]} to bfloat16"] = partial(_gather, stored), 0
    rows["merge_states bfloat16"] = _merge, 0
    rows["copy_blocks bfloat16 read"] = _copy, 0
    rows["copy_blocks bfloat16 write"] = _copy, 1
    rows["gather_kv bfloat16"] = _gather, 0
    return rows


def launch_of(arch: str, name: str) -> Launch:
    call, index = cases(arch)[name]
    device = config.device
    config.device = lambda tensor: (arch if arch in NVIDIA else "small", 132)
    try:
        with recording() as launches:
            call()
    finally:
        config.device = device
    return launches[index]


def problems(arch: str, name: str, launch: Launch, report: Report) -> list[str]:
    """What keeps a kernel from its speed: spills, too much shared memory, missing instructions."""
    target = TARGETS[arch]
    found = []
    if report.stack_bytes or report.local_memory_instructions:
        found.append(f"spills: {report.stack_bytes} bytes, {report.local_memory_instructions} instructions")
    threads = 32 * launch.meta["num_warps"]
    if report.registers > min(255, _REGISTERS // threads):
        found.append(f"registers: {report.registers} for each of {threads} threads")
    if report.shared_bytes > target.shared_bytes:
        found.append(f"shared memory: {report.shared_bytes} bytes of {target.shared_bytes}")
    if arch not in NVIDIA:  # with 64 threads a wave some rows are too short for 128-bit accesses
        return found
    if name.startswith("attention"):
        wanted = target.wide_instruction if launch.meta["SPEC"].BLOCK_M >= 64 and "float32" not in name else "HMMA"
        if "float32" not in name and report.tensor_core != wanted:
            found.append(f"tensor-core instruction: {wanted} expected, {report.tensor_core or 'none'} found")
        if not report.async_copies:
            found.append("keys and values are not loaded by asynchronous copies of 128 bits or of boxes")
    elif not report.loads_128 or not (report.stores_128 or name.startswith(_NARROW)):
        found.append("no 128-bit loads or stores")
    return found


def row_of(arch: str, name: str) -> tuple[str, list[str]]:
    """The table's line of one kernel, and its problems."""
    launch = launch_of(arch, name)
    report = inspect(compile_launch(launch, TARGETS[arch].capability))
    spec = launch.meta.get("SPEC")
    tile = f"{spec.BLOCK_M}x{spec.BLOCK_N}" if spec else "-"
    cells = [arch, name, tile, launch.meta["num_warps"], launch.meta.get("num_stages", "-"), report.registers]
    cells += [report.shared_bytes, report.local_memory_instructions, report.stack_bytes]
    cells += [f"{report.tensor_core_instructions} {report.tensor_core}".strip(), report.async_copies]
    per_64_keys = report.loop_instructions * 64 // spec.BLOCK_N if spec else "-"
    cells += [report.loads_128, report.stores_128, per_64_keys]
    return "| " + " | ".join(map(str, cells)) + " |", [
        f"{arch} {name}: {p}" for p in problems(arch, name, launch, report)
    ]


def digest() -> str:
    """Of the code that decides what is compiled, comments aside: the table says which it is of."""
    sha = hashlib.sha256()
    for file in [*sorted(Path(config.__file__).parent.glob("*.py")), Path(__file__)]:
        code = (line.partition("  # ")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
        sha.update("\n".join(line for line in code if line and not line.startswith("#")).encode())
    return sha.hexdigest()[:16]


HEADER = (
    "| target | kernel | tile | warps | stages | registers | shared bytes | spill instructions | stack bytes "
    "| tensor-core instructions | async copies of 128 bits or boxes | 128-bit loads | 128-bit stores "
    "| instructions per 64 keys |"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument("--only", default="", help="rows whose target and name contain this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    wanted = [(arch, name) for arch in TARGETS for name in cases(arch) if options.only in f"{arch} {name}"]
    if not wanted:
        parser.error(f"--only: expected part of a row's target and name, got {options.only!r}")
    lines, found = [HEADER, "|" + " --- |" * (HEADER.count("|") - 1)], []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for line, row_problems in pool.map(row_of, *zip(*wanted, strict=True)):
            print(line, flush=True)
            lines.append(line)
            found += row_problems
    if options.write:
        intro = f"Kernels compiled without a device by Triton {triton.__version__}: `python -m {__spec__.name}`.\n"
        intro += f"Of the sources {digest()}.\n\n"
        notes = options.write.read_text().partition("\n## ") if options.write.exists() else ("", "", "")
        options.write.write_text(intro + "\n".join(lines) + "\n" + "".join(notes[1:]))  # what was written below stays
    print("\n".join(found) or "no problems", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
