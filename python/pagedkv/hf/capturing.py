"""CUDA graphs: the kernels of a forward in one launch, on the tensors that they were captured with."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import ModelOutput

from ..transfers import current
from .cache import PagedCache
from .layers import PagedLayer
from .tags import TAG
from .tracing import untraced

logger = logging.getLogger(__name__)

# with other arguments than these a model may do more than attend and work token by token
PLAIN = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
_COPIED = ("input_ids", "position_ids")


def capture(call: Callable[[], Any], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call whose kernels have run before, and its result, which each replay overwrites.

    Args:
        memory: of ``torch.cuda.graph_pool_handle()``, for graphs that run one after the other.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        result = call()
    return graph, result


class _LastOp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the name of the op that was called last."""

    name: str = "an op"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = function._schema.name
        return function(*args, **kwargs or {})


def warn_uncaptured(log: logging.Logger, error: Exception, again: Callable[[], Any]) -> None:
    """Say where capturing failed, and at which op, seen by trying again."""
    last = _LastOp()  # type: ignore[no-untyped-call]
    with last, contextlib.suppress(Exception):
        again()
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = "pagedkv: decode runs without CUDA graphs: %s can not be captured, in %s at `%s`: %s"
    log.warning(text, last.name, place.name, place.line, error)


def reads_blocks_only(cache: PagedCache, cache_name: str, kwargs: dict[str, Any]) -> bool:
    """A forward of token ids whose layers all read blocks, under masks that are markers, and nothing besides."""
    ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    markers = list(mask.values()) if isinstance(mask, dict) else [mask]
    return (
        given <= PLAIN | {cache_name}
        and all(type(layer) is PagedLayer for layer in cache.layers)
        and cache.is_compileable
        and isinstance(ids, Tensor)
        and isinstance(positions, Tensor)
        and positions.dim() >= 2
        and all(hasattr(marker, TAG) for marker in markers)
        and cache.state.is_pending
    )


class StepGraphs:
    """The decode steps of a model, captured one by one for each size of a batch.

    A step is computed by its own call at first, for its kernels to be compiled and chosen; captured and replayed at its
    second; and replayed from then on. Ids and positions are copied to where the graph reads them, block tables, blocks
    and weights are read where they are. Where capturing fails, steps are called as they were, after one warning.

    Args:
        call: the forward. cache_name: of its cache argument.
        pool: whose blocks and tables the graphs read; a forward over those of another is called.
    """

    def __init__(self, call: Callable[..., Any], cache_name: str, pool: Any) -> None:
        self._call, self._cache_name, self._pool = call, cache_name, pool
        self._graphs: dict[Any, _StepGraph | None] = {}
        self._memory: Any = None
        self._has_failed = False

    def clear(self) -> None:
        self._graphs.clear()

    @untraced
    def __call__(self, **kwargs: Any) -> Any:
        cache = kwargs[self._cache_name]
        is_served = cache.pool is self._pool and reads_blocks_only(cache, self._cache_name, kwargs)
        if self._has_failed or not is_served or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
            return self._call(**kwargs)
        plain = ((name, value) for name, value in kwargs.items() if isinstance(value, int | None))
        copied = [kwargs[name] for name in _COPIED]
        kind = (self._pool.table_width, *plain, *((tensor.shape, tensor.dtype) for tensor in copied))
        if kind not in self._graphs:
            self._graphs[kind] = None
            return self._call(**kwargs)
        graph = self._graphs[kind]
        if graph is None:
            try:
                graph = self._graphs[kind] = self._capture(kwargs)
            except Exception as error:  # whatever an op raises in a capture
                self._has_failed = True
                self.clear()
                cache.state.begin_again()
                warn_uncaptured(logger, error, lambda: self._capture(kwargs))
            finally:
                cache.state.begin_again()
            if graph is None:
                return self._call(**kwargs)
        return graph.replay(cache, copied)

    def _capture(self, kwargs: dict[str, Any]) -> _StepGraph:
        device = kwargs["input_ids"].device
        with current(device):
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            with torch.inference_mode(False):
                inputs = {name: kwargs[name].clone() for name in _COPIED}
            graph, output = capture(lambda: self._call(**kwargs | inputs), self._memory)
        return _StepGraph(graph, list(inputs.values()), output, kwargs[self._cache_name])


class _StepGraph:
    """One captured step: where it reads ids and positions, and what it gives."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: list[Tensor], output: Any, cache: PagedCache) -> None:
        if not isinstance(output, ModelOutput) or not all(isinstance(x, Tensor | PagedCache) for x in output.values()):
            raise NotImplementedError(f"an output of logits and the cache, got {type(output).__name__}")
        self._graph, self._inputs, self._kind = graph, inputs, type(output)
        self._tensors = {name: value for name, value in output.items() if value is not cache}
        self._caches = [name for name, value in output.items() if value is cache]

    def replay(self, cache: PagedCache, inputs: list[Tensor]) -> ModelOutput:
        """The output of a step of this cache, in tensors of its own."""
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        cache.state.end()
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return self._kind(**tensors, **dict.fromkeys(self._caches, cache))
