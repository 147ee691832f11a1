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
from .kv_pool import Pool
from .paged_layers import PagedLayer
from .tags import TAG
from .untraced import untraced

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

    def __init__(self, call: Callable[..., Any], cache_name: str, pool: Pool) -> None:
        self._call, self._cache_name, self._pool = call, cache_name, pool
        self._steps: dict[Any, _Step] = {}
        self._memory: Any = None
        self._has_failed = False

    def clear(self) -> None:
        self._steps.clear()

    @untraced
    def __call__(self, **kwargs: Any) -> Any:
        cache = kwargs[self._cache_name]
        kind = self._kind(cache, kwargs)
        if kind is None:
            return self._call(**kwargs)
        step = self._steps.get(kind)
        if step is None:
            step = self._steps[kind] = _Step(kwargs)
            return self._call(**kwargs | step.inputs)
        if step.graph is None:
            try:
                self._capture(step, kwargs)
            except Exception as error:  # whatever an op raises in a capture
                self._has_failed = True
                self.clear()
                warn_uncaptured(logger, error, lambda: self._capture(step, kwargs))
                return self._call(**kwargs)
        return step.replay(cache, kwargs)

    def _kind(self, cache: PagedCache, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """All that one graph can not serve another value of; None: not to be captured."""
        if self._has_failed or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
            return None
        plain = [(name, kwargs.get(name)) for name in PLAIN if name not in (*_COPIED, "attention_mask")]
        is_plain = all(isinstance(value, int | None) for _, value in plain)
        if cache.pool is not self._pool or not is_plain or not reads_blocks_only(cache, self._cache_name, kwargs):
            return None
        copied = ((kwargs[name].shape, kwargs[name].dtype) for name in _COPIED)
        return (self._pool.table_width, *plain, *copied)

    def _capture(self, step: _Step, kwargs: dict[str, Any]) -> None:
        cache = kwargs[self._cache_name]
        with current(kwargs["input_ids"].device), cache.state.unwritten():
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            graph, output = capture(lambda: self._call(**kwargs | step.inputs), self._memory)
        step.keep(graph, output, cache)


class _Step:
    """One kind of step: where its graph reads ids and positions, and what it gives."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        with torch.inference_mode(False):
            self.inputs = {name: kwargs[name].clone(memory_format=torch.contiguous_format) for name in _COPIED}
        self.graph: torch.cuda.CUDAGraph | None = None

    def keep(self, graph: torch.cuda.CUDAGraph, output: Any, cache: PagedCache) -> None:
        if not isinstance(output, ModelOutput) or not all(isinstance(x, Tensor | PagedCache) for x in output.values()):
            raise NotImplementedError(f"an output of logits and the cache, got {type(output).__name__}")
        self._kind = type(output)
        self._tensors = {name: value for name, value in output.items() if value is not cache}
        self._caches = [name for name, value in output.items() if value is cache]
        self.graph = graph

    def replay(self, cache: PagedCache, kwargs: dict[str, Any]) -> ModelOutput:
        """The output of a step of this cache, in tensors of its own."""
        assert self.graph is not None
        for name, static in self.inputs.items():
            static.copy_(kwargs[name])
        self.graph.replay()
        cache.state.set_done(True)
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return self._kind(**tensors, **dict.fromkeys(self._caches, cache))
