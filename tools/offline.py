"""Compiles recorded launches for an architecture without a device, and reads what the assembler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedkv_ops._triton.launch import OPTIONS, Launch

_POINTEES = {
    "uint8": "u8",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", *OPTIONS)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Report(NamedTuple):
    """What the assembler reports of one kernel, and counts of the instructions that decide its speed."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    local_memory_instructions: int  # spills
    tensor_core_instructions: int
    tensor_core: str  # mnemonic
    async_copies: int  # of 128 bits, or of whole boxes
    loads_128: int
    stores_128: int
    loop_instructions: int  # of the shortest loop with a matrix product: a tile of keys that every row sees whole


def _argument(value: Any, specialise: bool) -> tuple[str, bool]:
    """Triton's type of an argument, and whether its value (a pointer's address) is a multiple of 16."""
    if value is None:
        return "constexpr", False
    if isinstance(value, Tensor):
        return "*" + _POINTEES[str(value.dtype).removeprefix("torch.")], True  # torch aligns allocations
    if isinstance(value, float):
        return "fp32", False
    if specialise and value == 1:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), specialise and value % 16 == 0


def _source(launch: Launch) -> ASTSource:
    """The source that Triton's launcher would compile for these arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = dict(zip((p.name for p in launch.kernel.params), launch.args, strict=False))
    values |= {name: value for name, value in launch.meta.items() if name not in _OPTIONS}
    for i, parameter in enumerate(launch.kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        parts = value if isinstance(value, tuple) else (value,)
        types = []
        for j, part in enumerate(parts):
            path = (i, j) if isinstance(value, tuple) else (i,)
            kind, divisible = _argument(part, not parameter.do_not_specialize)
            types.append(kind)
            if kind == "constexpr":
                constants[path] = part
            elif divisible:
                attributes[path] = [["tt.divisibility", 16]]
        named = type(value)._make if hasattr(value, "_fields") else tuple  # fields are read by their names
        signature[parameter.name] = named(types) if isinstance(value, tuple) else types[0]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, target: int | str) -> Any:
    """Triton's compiled kernel (``.asm["ttgir" | "ptx" | "cubin" | "amdgcn"]``); target 90 is sm_90, else "gfx942"."""
    options = {name: launch.meta[name] for name in _OPTIONS if name in launch.meta}
    if isinstance(target, int):
        return triton.compile(_source(launch), target=GPUTarget("cuda", target, 32), options=options)
    threads = 64 if target.startswith("gfx9") else 32
    return triton.compile(_source(launch), target=GPUTarget("hip", target, threads), options=options)


def _disassembled(compiled: Any) -> tuple[str, str]:
    """Resource usage and instructions of the machine code."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return _run("cuobjdump", "--dump-resource-usage", cubin), _run("nvdisasm", "-c", cubin)


def float_instructions(compiled: Any) -> dict[str, int]:
    """Number of floating-point instructions by mnemonic."""
    names = r"\b((?:FFMA|FMUL|FADD|FMNMX|FSEL|MUFU|HMMA|HGMMA|F2FP)[\w.]*)"
    return dict(sorted(Counter(re.findall(names, _disassembled(compiled)[1])).items()))


def _shortest_loop(sass: str) -> int:
    """Instructions of the shortest backward jump over a matrix product, 0 without one."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    shortest = 0
    for label, instruction in re.findall(r"^\s*(\.L_x_\w+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE):
        if label:
            labels[label] = len(instructions)
            continue
        instructions.append(instruction)
        jump = re.search(r"\bBRA\b.*?(\.L_x_\w+)", instruction)
        if jump and jump[1] in labels:
            loop = instructions[labels[jump[1]] :]
            if any("MMA" in each for each in loop) and not 0 < shortest < len(loop):
                shortest = len(loop)
    return shortest


def _inspect_amd(compiled: Any) -> Report:
    """Vector registers count; of instructions only those that every kernel has."""
    code = compiled.asm["amdgcn"]
    accesses = [len(re.findall(rf"\b(?:global|buffer)_{kind}_(?:b128|dwordx4)\b", code)) for kind in ("load", "store")]
    return Report(
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        shared_bytes=compiled.metadata.shared,
        stack_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        local_memory_instructions=_number(r"\.vgpr_spill_count:\s+(\d+)", code),
        tensor_core_instructions=0,
        tensor_core="",
        async_copies=0,
        loads_128=accesses[0],
        stores_128=accesses[1],
        loop_instructions=0,
    )


def inspect(compiled: Any) -> Report:
    if "amdgcn" in compiled.asm:
        return _inspect_amd(compiled)
    usage, sass = _disassembled(compiled)
    tensor_core = re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTC\w*MMA|QGMMA|IMMA|OMMA)\b", sass)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Report(
        registers=_number(r"REG:(\d+)", usage),
        shared_bytes=compiled.metadata.shared,
        stack_bytes=_number(r"STACK:(\d+)", usage),
        local_memory_instructions=count(r"\b(?:STL|LDL)\b"),
        tensor_core_instructions=len(tensor_core),
        tensor_core=tensor_core[0] if tensor_core else "",
        async_copies=count(r"\bLDGSTS\.\S*128|\bUTMALDG\b"),
        loads_128=count(r"\bLDG\.\S*128"),
        stores_128=count(r"\bSTG\.\S*128"),
        loop_instructions=_shortest_loop(sass),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the assembler reports no {pattern}: {text}")
    return int(found[1])


def _run(tool: str, *args: object) -> str:
    return subprocess.run([_TOOLS / tool, *map(str, args)], check=True, capture_output=True, text=True).stdout
