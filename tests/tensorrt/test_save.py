"""torch_tensorrt.save of a compiled decoder: the loaded program keeps its writes, without this integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagedkv.integrations.torch_tensorrt import UnsafePagedGraphError
from tests.export.decoder import (
    BLOCKS_PER_SEQUENCE,
    Decoder,
    assert_caches_equal,
    decode,
    expected,
    new_caches,
    step_inputs,
)

from .compiling import export_and_compile

LAYERS = pytest.mark.parametrize("num_layers", [1, 2])


class Flat(nn.Module):
    """A decoder whose caches are inputs of their own: torch_tensorrt.save takes no lists."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.decoder = Decoder(num_layers)

    def forward(self, tokens: Tensor, positions: Tensor, block_table: Tensor, *caches: Tensor) -> Tensor:
        return self.decoder(tokens, positions, block_table, list(caches))


def flat(step: Any) -> Any:
    return lambda tokens, positions, table, caches: step(tokens, positions, table, *caches)


def check_loaded(path: Path, num_layers: int, batch: int = 2) -> None:
    program = torch.export.load(path)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert not [node for node in calls if "pagedkv.integrations" in getattr(node.target, "__module__", "")]
    tokens, wanted = expected(num_layers, batch=batch)
    caches = new_caches(num_layers)
    assert decode(flat(program.module()), batch=batch, caches=caches) == tokens
    assert_caches_equal(caches, wanted)


@LAYERS
def test_saved_with_caches_as_inputs(installed: None, tmp_path: Path, num_layers: int) -> None:
    import torch_tensorrt

    args = (*step_inputs(2), *new_caches(num_layers))
    step = export_and_compile(Flat(num_layers), args)
    torch_tensorrt.save(step, str(tmp_path / "step.pt2"), arg_inputs=list(args))
    check_loaded(tmp_path / "step.pt2", num_layers)


@LAYERS
def test_saved_with_caches_as_buffers(installed: None, tmp_path: Path, num_layers: int) -> None:
    import torch_tensorrt

    step = export_and_compile(Decoder(num_layers, buffers=True), step_inputs(2))
    torch_tensorrt.save(step, str(tmp_path / "step.pt2"), arg_inputs=list(step_inputs(2)))
    loaded = torch.export.load(tmp_path / "step.pt2").module()
    tokens, wanted = expected(num_layers)
    assert decode(loaded) == tokens
    buffers = dict(loaded.named_buffers())
    names = [next(name for name in buffers if name.endswith(f"cache_{i}")) for i in range(2 * num_layers)]
    assert_caches_equal([buffers[name] for name in names], wanted)


def test_saved_for_aot_inductor(installed: None, tmp_path: Path) -> None:
    import torch_tensorrt

    args = (*step_inputs(2), *new_caches(2))
    step = export_and_compile(Flat(2), args)
    torch_tensorrt.save(step, str(tmp_path / "step.pt2"), arg_inputs=list(args), output_format="aot_inductor")
    tokens, wanted = expected()
    caches = new_caches(2)
    assert decode(flat(torch._inductor.aoti_load_package(str(tmp_path / "step.pt2"))), caches=caches) == tokens
    assert_caches_equal(caches, wanted)


def test_exported_again_with_a_dynamic_batch(installed: None, tmp_path: Path) -> None:
    """Without engines torch_tensorrt.save takes static shapes only; what it calls for those takes dynamic ones too."""
    import torch_tensorrt

    batch = torch.export.Dim("batch", min=1, max=4)
    shapes = ({0: batch}, {0: batch}, {0: batch})
    vector = {"dtype": torch.int64, "min_shape": (1,), "opt_shape": (2,), "max_shape": (4,)}
    table = {key: (*value, BLOCKS_PER_SEQUENCE) if key != "dtype" else value for key, value in vector.items()}
    args = (*step_inputs(2), *new_caches(2))
    inputs = [torch_tensorrt.Input(**spec) for spec in (vector, vector, table)]
    step = export_and_compile(Flat(2), args, (*shapes, (None,) * 4), arg_inputs=[*inputs, *args[3:]])
    program = torch.export.export(step, args, dynamic_shapes=(*shapes, *[None] * 4), strict=False)
    torch.export.save(program, tmp_path / "step.pt2")
    for size in (1, 2, 4):
        check_loaded(tmp_path / "step.pt2", 2, size)


def test_saving_without_retracing_is_refused(installed: None, tmp_path: Path) -> None:
    import torch_tensorrt

    args = (*step_inputs(2), *new_caches(1))
    step = export_and_compile(Flat(1), args)
    with pytest.raises(UnsafePagedGraphError, match="can only be saved with retrace=True"):
        torch_tensorrt.save(step, str(tmp_path / "step.pt2"), arg_inputs=list(args), retrace=False)
    assert not (tmp_path / "step.pt2").exists()
