"""The checks under which every interpreted test runs see faults: here a line of a kernel is replaced by a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.builders import make_caches, sliced

from .test_append import make_args
from .worker import DEVICE, Kernels

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="checks of Triton's interpreter")

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")


def call_with_source(function: str, right: str, wrong: str, op: str, args: Any, options: dict[str, Any]) -> Any:
    """The op, one of whose device functions ("module.name") has ``wrong`` in its source instead of ``right``."""
    import ast
    import inspect
    import textwrap
    from importlib import import_module

    from pagedkv_ops import _triton

    module, name = function.split(".")
    interpreted = getattr(import_module(f"pagedkv_ops._triton.{module}"), name)
    original = interpreted.rewrite()
    source = textwrap.dedent(inspect.getsource(interpreted.fn))
    source = source[source.index("def ") :]
    assert source.count(right) == 1, "the planted fault is not of this kernel"
    tree = interpreted.rewriter.ast_transformer.visit(ast.parse(source.replace(right, wrong)))
    found: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(interpreted.fn), "exec"), original.__globals__, found)
    interpreted.rewritten_fn[interpreted.fn] = found[name]
    try:
        return getattr(_triton, op)(*args, **options)
    finally:
        interpreted.rewritten_fn[interpreted.fn] = original


CACHES = make_caches(4, 4, 3, 13, 13)
ROWS = sliced(torch.randn(3, 3, 13))
FAR_OFF = 1 << 20  # blocks: behind every tensor, wherever the allocator puts them
INDICES = (torch.tensor([[3, 1], [2, FAR_OFF], [0, 0]]), torch.tensor([5, 8, 0]))
WRITE = ("write_kv", (ROWS, ROWS, *CACHES, torch.tensor([3, 4 * FAR_OFF, -4 * FAR_OFF])), {})
ATTEND = ("paged_attention", (ROWS, *CACHES, *INDICES), {})
SPLIT = ("paged_attention", (ROWS, *CACHES, *INDICES), {"num_splits": 3})
APPEND = ("paged_attention_append", make_args("twice", head_size=13), {})
FAR = ("paged_attention_append", make_args("out of range"), {})
SHARED = ("paged_attention_append", make_args("middle", shared_table=True), {})
MERGE = ("merge_states", (ROWS, torch.zeros(3, 3), ROWS, torch.zeros(3, 3)), {})
COPY = ("copy_blocks", ([CACHES[0]], torch.tensor([[0, 1], [2, FAR_OFF]])), {})
GATHER = ("gather_kv", (CACHES[0], *INDICES, 9), {})

BEFORE = "read before it was written"

FAULTS = [
    # slot guards, and guards of block ids
    ("writing.write_kernel", "(slot < 0) | (block >= num_blocks)", "slot < 0", WRITE, "outside of every tensor"),
    ("writing.write_kernel", "(slot < 0) | (block >= num_blocks)", "block >= num_blocks", WRITE, "outside of every"),
    ("append_kernel.store_new", "(slot >= 0) & (block < num_blocks) & ", "", FAR, "outside of every tensor"),
    ("blocks.copy_kernel", " | (dst >= num_blocks)", "", COPY, "outside of every tensor"),
    ("gathering.gather_kernel", " & (block < num_blocks))[:, None]", ")[:, None]", GATHER, "outside of every tensor"),
    # masks
    ("writing._store_heads", " & (d_range < D)[None, :]", "", WRITE, "outside of every view"),
    ("writing._store_heads", "(head < num_heads)[:, None] & ", "", WRITE, "outside of every"),
    ("blocks.copy_kernel", "+ within, mask), mask)", "+ within, mask))", COPY, "outside of every"),
    ("gathering.gather_kernel", "(position < max_len)[:, None] & d_mask", "d_mask", GATHER, "two programs|outside of"),
    ("states.merge_kernel", "head < NUM_HEADS", "head < NUM_HEADS + 1", MERGE, "outside of every"),
    ("attention_kernel._load_rows", " & (d_range < SPEC.D)[None, :]", "", ATTEND, "outside of every view"),
    ("attention_kernel._store_rows", " & (dv_range < SPEC.DV)[None, :]", "", ATTEND, "two programs"),
    # what another program of the launch writes
    ("append_kernel.store_new", " & (last_writer == token)", "", APPEND, "written by two programs"),
    (
        "append_kernel.rows_of_writers",
        "tl.where(writer >= 0, new_key_rows, key_rows)",
        "key_rows",
        SHARED,
        "after another",
    ),
    # scratch, and results
    ("attention_kernel._store_rows", "tl.store(out_ptr", "out_mask &= seen[:, None]; tl.store(out_ptr", SPLIT, BEFORE),
    ("splits.combine_kernel", "mask = split < num_splits", "mask = split < 2 * num_splits", SPLIT, BEFORE),
    (
        "attention_kernel._store_rows",
        "acc.to(out_ptr.dtype.element_ty), out_mask",
        "acc, out_mask & seen[:, None]",
        ATTEND,
        "returned before",
    ),
]


@pytest.mark.parametrize(("function", "right", "wrong", "call", "report"), FAULTS)
def test_a_planted_fault_is_reported(
    kernels: Kernels, function: str, right: str, wrong: str, call: tuple[str, Any, dict[str, Any]], report: str
) -> None:
    with pytest.raises(AssertionError, match=report):
        kernels.run(call_with_source, function, right, wrong, *call)
    kernels.run(call_with_source, function, right, right, *call)
