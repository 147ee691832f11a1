"""Builds the C++ extension; everything else about the package is in pyproject.toml.

Environment: MAX_JOBS (compiler processes at a time), CXX, PAGEDKV_SANITIZE=address (a build for fuzzing).
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

if not os.environ.get("CXX"):
    os.environ.pop("CXX", None)  # setuptools would take the first flag for the compiler

# Each set of kernels is a translation unit of its own, chosen at run time: only these files may use these instructions.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
MACHINE_FLAGS = {
    "kernels_avx2.cpp": AVX2,
    "kernels_avx512.cpp": AVX512,
    "kernels_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
    "kernels_avx512_amx.cpp": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"],
}
OPTIONAL = {"kernels_avx512_amx.cpp": "-DPAGEDKV_HAS_AMX"}  # needs GCC 11 or Clang 12; told to the file that chooses

DEFINITIONS = "pagedkv_ops._definitions"

X86 = platform.machine().lower() in ("x86_64", "amd64")
SANITIZE = os.environ.get("PAGEDKV_SANITIZE", "")
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",  # Clang knows only some of these
    # false positives: intrinsics that start from an undefined register, unions in torch's headers
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-ignored-attributes",
    "-Wno-psabi",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]


def sources() -> list[str]:
    root = Path("csrc")
    files = sorted(p.as_posix() for p in root.rglob("*.cpp"))
    return [f for f in files if X86 or Path(f).name not in MACHINE_FLAGS]


def knows(compiler: str, flags: list[str]) -> bool:
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


class BuildExtension(build_ext):
    """Compiles each file with its own flags, several at a time."""

    def write_definitions(self) -> str:
        """The schemas for C++ programs: a library of its own, because in Python the package defines them itself."""
        source = Path(self.build_temp) / "definitions.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(runpy.run_path("pagedkv_ops/schema.py")["cpp_definitions"]())
        return str(source)

    def build_extension(self, ext: Extension) -> None:
        if ext.name == DEFINITIONS:
            ext.sources = [self.write_definitions()]
        compiler = os.environ.get("CXX", self.compiler.compiler_cxx[0])
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"pagedkv needs a C++20 compiler to build its CPU kernels, and {compiler!r} was not found. Install "
                "GCC 12 or Clang 14 or later (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install), or name one with the environment variable CXX."
            )
        flags = list(COMPILE_FLAGS)
        if SANITIZE:
            self.build_temp = str(Path(self.build_temp) / SANITIZE)  # never reuse objects of the plain build
            flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-O1", "-g1"]

        for name, definition in OPTIONAL.items():
            files = [s for s in ext.sources if Path(s).name == name]
            if not files:
                continue
            if knows(compiler, MACHINE_FLAGS[name]):
                flags.append(definition)
            else:
                ext.sources.remove(files[0])

        newest_header = max(Path(p).stat().st_mtime for p in ["setup.py", *ext.depends])

        def compile_one(source: str) -> list[str]:
            objects = self.compiler.object_filenames([source], output_dir=self.build_temp)
            changed = max(newest_header, Path(source).stat().st_mtime)
            if not self.force and Path(objects[0]).exists() and Path(objects[0]).stat().st_mtime > changed:
                return objects
            machine = MACHINE_FLAGS.get(Path(source).name, [])
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=[*flags, *machine, *(f"-isystem{path}" for path in include_paths())],
                depends=ext.depends,
            )

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            objects = [o for one in pool.map(compile_one, ext.sources) for o in one]
        link_flags = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch", "torch_cpu", "c10"],
            library_dirs=[TORCH_LIB_PATH],
            extra_postargs=link_flags,
            build_temp=self.build_temp,
            target_lang="c++",
        )


setup(
    package_dir={"pagedkv_ops": "pagedkv_ops", "pagedkv": "python/pagedkv"},
    ext_modules=[
        Extension(
            "pagedkv_ops._C",
            sources(),
            depends=sorted(p.as_posix() for p in Path("csrc").rglob("*.h")),
            py_limited_api=True,
        ),
        Extension(DEFINITIONS, [], depends=["pagedkv_ops/schema.py"], py_limited_api=True),
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
