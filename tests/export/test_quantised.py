"""Quantised caches with dynamic scales, whose scale caches a program writes as it writes the caches."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from .decoder import Decoder, assert_caches_equal, decode, expected, new_caches, step_inputs
from .test_in_place import FUNCTIONAL, rewrite

QUANTISED = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
APPEND = pytest.mark.parametrize("append", [False, True], ids=["write_then_attend", "append"])


def export(dtype: torch.dtype, append: bool) -> torch.export.ExportedProgram:
    return torch.export.export(Decoder(append=append), (*step_inputs(2), new_caches(2, dtype=dtype)))


@QUANTISED
@APPEND
def test_decomposed_programs_name_their_scale_caches(dtype: torch.dtype, append: bool) -> None:
    tokens, wanted = expected(append=append, dtype=dtype)
    program = export(dtype, append).run_decompositions()
    assert len(program.graph_signature.user_inputs_to_mutate) == len(wanted) == 8
    caches = new_caches(2, dtype=dtype)
    assert decode(program.module(), caches=caches) == tokens
    assert_caches_equal(caches, wanted)
    assert all(scales.any() for scales in (*caches[2:4], *caches[6:8]))


@QUANTISED
@APPEND
def test_rewritten_graphs_write_scales_in_place(dtype: torch.dtype, append: bool) -> None:
    tokens, wanted = expected(append=append, dtype=dtype)
    gm: GraphModule = export(dtype, append).run_decompositions().module()  # type: ignore[assignment]
    assert len(rewrite(gm)) == 8
    assert not gm.graph.find_nodes(op="call_function", target=FUNCTIONAL)
    caches = new_caches(2, dtype=dtype)
    assert decode(gm, caches=caches) == tokens
    assert_caches_equal(caches, wanted)
