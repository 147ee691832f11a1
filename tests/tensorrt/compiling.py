"""The two ways into Torch-TensorRT, as dry runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedkv.integrations.torch_tensorrt import UnsafePagedGraphError

OPTIONS: dict[str, Any] = {"dryrun": True, "min_block_size": 1}


def export_and_compile(
    model: Any, args: tuple[Any, ...], dynamic_shapes: Any = None, strict: bool = False, **options: Any
) -> Any:
    import torch_tensorrt

    program = torch.export.export(model, args, dynamic_shapes=dynamic_shapes, strict=strict)
    inputs = options.pop("arg_inputs", list(args))
    compiled = torch_tensorrt.dynamo.compile(
        program, arg_inputs=inputs, offload_module_to_cpu=True, **{**OPTIONS, **options}
    )
    return compiled.to("cpu")


def torch_compile(model: Any, dynamic: bool | None = False, **options: Any) -> Any:
    return torch.compile(model, backend="tensorrt", dynamic=dynamic, options={**OPTIONS, **options})


def compile_error(step: Callable[..., Any], args: tuple[Any, ...]) -> BaseException:
    """The UnsafePagedGraphError of a first call, which torch.compile wraps."""
    from torch._dynamo.exc import BackendCompilerFailed

    with pytest.raises((UnsafePagedGraphError, BackendCompilerFailed)) as caught:
        step(*args)
    error: BaseException = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, UnsafePagedGraphError)
    return error
