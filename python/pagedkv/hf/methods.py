"""What a patched model does in place of its class's own methods."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from transformers.cache_utils import DynamicCache

from . import reuse
from .cache import PagedCache
from .handle import ATTRIBUTE, Patch
from .planning import make_traceable, plan
from .refusals import check_inputs_are_ids
from .untraced import break_graph, skipped


class _PatchedMethods:
    """Methods of a patched model, in front of those of its class."""

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        patch: Patch | None = self.__dict__.get(ATTRIBUTE)
        cache = None if patch is None else kwargs.get(patch.cache_name)
        if patch is None or not isinstance(cache, PagedCache):
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():  # inlined into a function that is compiled: ask for a frame of its own
            break_graph()
        if cache.state.rows is None and patch.created is None:
            patch.follow_model(self)
        return patch.run(_planned, self, patch, cache, call, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        patch: Patch = self.__dict__[ATTRIBUTE]
        check_inputs_are_ids(self)
        patch.follow_model(self)
        return patch.run(_generated, patch, super().generate, args, kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        patch: Patch = self.__dict__[ATTRIBUTE]
        given = model_kwargs.get(patch.cache_name)
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]
        native = model_kwargs.get(patch.cache_name)
        wants_weights = generation_config.output_attentions or getattr(self.config, "output_attentions", False)  # type: ignore[attr-defined]
        if given is not None or type(native) is not DynamicCache or native.offloading or wants_weights:
            return result
        cache = model_kwargs[patch.cache_name] = patch.new_cache(self)
        if patch.created is not None:
            patch.created.append(cache)
        if patch.watch.row_watchers() is None:
            cache.state.copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if any(getattr(layer, "record_past", False) for layer in native.layers):
            cache.activate_past_recording()
        return result

    def _prefill(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        patch: Patch = self.__dict__[ATTRIBUTE]
        cache = model_kwargs.get(patch.cache_name)
        if patch.pool.prefix_caching and isinstance(cache, PagedCache):
            reuse.attach(patch.watch, patch.cache_name, cache, input_ids, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the unpatched model."""
        state = {name: value for name, value in self.__dict__.items() if name != ATTRIBUTE}
        return _new, (self.__dict__[ATTRIBUTE].original_class,), state


@skipped
def _planned(model: Any, patch: Patch, cache: PagedCache, call: Any, args: Any, kwargs: Any) -> Any:
    call = plan(model, patch, cache, call, args, kwargs)
    is_compiled = model._compiled_call_impl or "forward" in model.__dict__
    if is_compiled or callable(get_eval_frame_callback()):  # the last: inside torch.compile(model)
        make_traceable(model, cache, kwargs)
    output = call(*args, **kwargs)
    cache.state.write_pending()  # a forward that fails leaves keys missing, and the state knows it
    return output


def _generated(patch: Patch, generate: Any, args: Any, kwargs: Any) -> Any:
    outer, output = patch.created, None
    created: list[PagedCache] = []
    try:
        try:
            patch.created = created
            output = generate(*args, **kwargs)
            return output
        finally:
            patch.created = outer
            patch.release(created, output)
    finally:  # an interrupt within the two lines above
        patch.created = outer


def _new(original: Any) -> Any:
    return original.__new__(original)


@functools.cache
def patched_class(original: Any) -> type:
    """The class of a patched model: its own, with :class:`_PatchedMethods` in front."""
    names: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    for name, method in vars(_PatchedMethods).items():
        if isinstance(method, FunctionType) and hasattr(original, name) and not name.startswith("__"):
            # generate() looks at the signatures of methods
            names[name] = FunctionType(method.__code__, method.__globals__, name, None, method.__closure__)
            names[name].__signature__ = inspect.signature(getattr(original, name))
    return type(original.__name__, (_PatchedMethods, original), names)
