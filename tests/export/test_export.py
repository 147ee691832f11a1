"""torch.export: programs with paged caches as buffers or as inputs keep their writes from step to step."""

from __future__ import annotations

import io

import pytest
import torch

from .decoder import Decoder, assert_caches_equal, decode, expected, new_caches, step_inputs

STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
APPEND = pytest.mark.parametrize("append", [False, True], ids=["write_then_attend", "append"])


def export_with_inputs(strict: bool, append: bool = False, layout: str = "HND") -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=4)
    shapes = ({0: batch}, {0: batch}, {0: batch}, [None] * 4)
    args = (*step_inputs(2), new_caches(2, layout))
    return torch.export.export(Decoder(append=append), args, dynamic_shapes=shapes, strict=strict)


@STRICT
@APPEND
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_caches_as_inputs(strict: bool, append: bool, layout: str) -> None:
    step = export_with_inputs(strict, append, layout).module()
    for batch in (2, 1, 4):
        tokens, wanted = expected(append=append, batch=batch)
        caches = new_caches(2, layout)
        assert decode(step, batch=batch, caches=caches) == tokens
        assert_caches_equal(caches, wanted)


@STRICT
@APPEND
def test_caches_as_buffers(strict: bool, append: bool) -> None:
    tokens, wanted = expected(append=append)
    step = torch.export.export(Decoder(buffers=True, append=append), step_inputs(2), strict=strict).module()
    assert decode(step) == tokens
    assert_caches_equal([step.get_buffer(f"cache_{i}") for i in range(4)], wanted)


@STRICT
def test_decomposed_programs_name_what_they_write(strict: bool) -> None:
    program = export_with_inputs(strict).run_decompositions()
    assert len(program.graph_signature.user_inputs_to_mutate) == 4
    buffers = torch.export.export(Decoder(buffers=True), step_inputs(2), strict=strict).run_decompositions()
    assert sorted(buffers.graph_signature.buffers_to_mutate.values()) == [f"cache_{i}" for i in range(4)]
    tokens, wanted = expected()
    caches = new_caches(2)
    assert decode(program.module(), caches=caches) == tokens
    assert_caches_equal(caches, wanted)


def test_saved_program() -> None:
    file = io.BytesIO()
    torch.export.save(export_with_inputs(strict=False), file)
    file.seek(0)
    tokens, wanted = expected()
    caches = new_caches(2)
    assert decode(torch.export.load(file).module(), caches=caches) == tokens
    assert_caches_equal(caches, wanted)


def test_tokens_depend_on_every_step() -> None:
    """Without this a program that forgets its writes would pass the tests above."""
    tokens, _ = expected()
    assert decode(lambda *inputs: Decoder()(*inputs[:3], new_caches(2)), caches=new_caches(2)) != tokens
    assert len({tuple(step) for step in tokens}) > 3
