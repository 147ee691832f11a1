# `make demo` and `make test` need nothing but Python >= 3.10 and a C++20 compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the CPU build of torch where the index serves it under this pin, and the Triton of that release; any supported torch
# works: make TORCH=torch
TORCH ?= torch==2.13.0 triton==3.7.1
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint format bench report fuzz clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV), then building pagedkv: some minutes"
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(TORCH) numpy "setuptools>=77" ninja
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[hf,dev]"
	@touch $(STAMP)

ARGS ?=
demo: setup
	$(BIN)/python examples/generate.py $(ARGS)

test: setup
	$(BIN)/python examples/_models.py smollm2 gemma3
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'examples/*.cpp' 'tests/*.cpp')

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'examples/*.cpp' 'tests/*.cpp')

bench: setup
	$(BIN)/python benchmarks/bench_ops.py --short

report: setup
	$(BIN)/python -m tools.compile_report --write benchmarks/triton_compile_report.md

FUZZ_SECONDS ?= 60
fuzz: setup
	$(BIN)/python -m tests.ops.fuzz --build --seconds $(FUZZ_SECONDS)

clean:
	rm -rf $(VENV) build dist *.egg-info pagedkv_ops/*.so
