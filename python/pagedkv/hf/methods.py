"""What a patched model carries, and what it does in place of its class's own methods."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_masks_for_generate

from ..cache import LayerSpec
from . import masks, prefill, reuse, support
from .cache import PagedCache, layer_windows
from .compiled import CompiledStep
from .identity import Identity, ModelWatch
from .kv_pool import Pool
from .layers import GATHERED
from .tracing import break_graph, skipped, untraced

ATTRIBUTE = "_pagedkv_patch"


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument of forward: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def placement(model: PreTrainedModel) -> Any:
    """Where the weights are and of which types: what a layer's keys and values follow."""
    return {(parameter.device, parameter.dtype) for parameter in model.parameters()}


class _Turn:
    """Whose turn it is with a model: its attention is switched for all of its patches and engines at once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0


_TURNS: WeakKeyDictionary[PreTrainedModel, _Turn] = WeakKeyDictionary()


class Patch:
    """What a patched model carries: the pool, the layers' modes, and the switch of its attention."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.options = options
        self.find_configs(model)
        self.cache_name = cache_argument(model)
        self.original_class = type(model)
        self.switches = support.uses_interface(model, self.configs)
        self.layers: list[tuple[str, LayerSpec | None]] = []  # mode, and shapes, as the first run found them
        self.placement: Any = None
        self.pool: Pool
        self.compiled: CompiledStep | None = None
        self.watch = ModelWatch(model)
        self._num_surveys = self.watch.num_surveys
        self.generating = 0  # calls of generate under way
        self._turn = _TURNS.setdefault(model, _Turn())
        self.created: list[PagedCache] = []  # by the calls of generate under way

    def set_pool(self, model: PreTrainedModel, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        text = model.config.get_text_config(decoder=True)
        self.pool = Pool(
            num_blocks,
            block_size,
            layer_windows(model.config),
            max_length=getattr(text, "max_position_embeddings", None) or 2048,
            kv_dtype=self.options["kv_dtype"],
            prefix_caching=prefix_caching,
        )

    def new_cache(self, model: PreTrainedModel) -> PagedCache:
        cache = PagedCache(model.config, pool=self.pool)
        self.teach(model, cache)
        return cache

    def teach(self, model: PreTrainedModel, cache: PagedCache) -> None:
        """Tell a fresh cache what the first run found, so that its first forward need not find it again."""
        if not self.switches:
            for layer in cache.state.layers:
                layer.mode = GATHERED
        if self.layers:
            same_placement = self.placement == placement(model) and cache.pool.kv_dtype == self.pool.kv_dtype
            for layer, (mode, spec) in zip(cache.state.layers, self.layers, strict=True):
                layer.mode, layer.spec = mode, spec if same_placement else None

    @untraced
    def follow_model(self, model: PreTrainedModel) -> Identity:
        """Notice what has changed in a model since its last call, before the next one begins."""
        with self._turn.lock:
            identity = self.watch.inspect()
            if self.watch.num_surveys != self._num_surveys and not self._turn.depth:
                self._num_surveys = self.watch.num_surveys
                self.find_configs(model)  # a new layer may read a config of its own
            if self.compiled is not None:
                self.compiled.follow()
        return identity

    def find_configs(self, model: PreTrainedModel) -> None:
        """The configs that name the attention of the model's layers, and what they name while nobody is switched."""
        self.configs = support.text_configs(model)
        self.implementations = [config._attn_implementation for config in self.configs]
        for config, name in zip(self.configs, self.implementations, strict=True):
            if name != masks.NAME:  # set by the user: what was dense before stays so
                masks.set_dense_implementation(config, name or "eager")

    def attention(self) -> _Attention:
        """Within it the model's attention layers call this library; outside they are as they were."""
        return _Attention(self)

    def _switch(self, names: list[str | None]) -> None:
        if self.switches:
            for config, name in zip(self.configs, names, strict=True):
                config._attn_implementation_internal = name

    def release(self, since: int, output: Any) -> None:
        """Give back the blocks of caches made since then, but for one that the caller gets."""
        kept = output.get(self.cache_name) if hasattr(output, "keys") else None
        for cache in self.created[since:]:
            if cache is not kept:
                cache.reset()
        del self.created[since:]


class _Attention:
    """See :meth:`Patch.attention`. Not traced by a compiler, like the planning: a graph holds the forward alone."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    @untraced
    def __enter__(self) -> None:
        patch, turn = self._patch, self._patch._turn
        turn.lock.acquire()  # the buffers of a decode step and the pool serve one call at a time: threads take turns
        turn.depth += 1
        if turn.depth == 1:
            patch._switch([masks.NAME] * len(patch.configs))

    @untraced
    def __exit__(self, *exc: object) -> None:
        patch, turn = self._patch, self._patch._turn
        turn.depth -= 1
        if turn.depth == 0:
            patch._switch(patch.implementations)
        turn.lock.release()


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
        if cache.state.rows is None and not patch.generating:
            patch.follow_model(self)
        with patch.attention():
            call = _plan(self, patch, cache, call, args, kwargs)
            is_compiled = self._compiled_call_impl or "forward" in self.__dict__  # type: ignore[attr-defined]
            if is_compiled or callable(get_eval_frame_callback()):  # the last: inside torch.compile(model)
                _make_traceable(self, cache, kwargs)
            return call(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        patch: Patch = self.__dict__[ATTRIBUTE]
        support.check_inputs_are_ids(self)
        patch.follow_model(self)
        with patch.attention():
            since, output = len(patch.created), None
            patch.generating += 1
            try:
                output = super().generate(*args, **kwargs)  # type: ignore[misc]
                return output
            finally:
                patch.generating -= 1
                patch.release(since, output)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        patch: Patch = self.__dict__[ATTRIBUTE]
        given = model_kwargs.get(patch.cache_name)
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]
        native = model_kwargs.get(patch.cache_name)
        wants_weights = generation_config.output_attentions or getattr(self.config, "output_attentions", False)  # type: ignore[attr-defined]
        if given is not None or type(native) is not DynamicCache or native.offloading or wants_weights:
            return result
        cache = model_kwargs[patch.cache_name] = patch.new_cache(self)
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


@untraced
def _plan(
    model: Any, patch: Patch, cache: PagedCache, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Plan the forward that is about to run, whatever kind of mask it was given; how it shall be called."""
    state = cache.state
    ids = kwargs.get("input_ids", args[0] if args else None)
    inputs = kwargs.get("inputs_embeds") if ids is None else ids
    if inputs is None:
        return call
    if patch.pool.prefix_caching:
        reuse.follow(patch.watch, state)
        if not patch.generating:
            reuse.follow_call(patch.watch, patch.cache_name, state, inputs, args, kwargs)
    if state.rows is None and not any(layer.spec for layer in state.layers):
        patch.teach(model, cache)  # the caller made it
    state.token_ids = ids
    mask, asked, (batch, length) = kwargs.get("attention_mask"), state.asked, inputs.shape[:2]
    is_made = isinstance(mask, dict) or (mask is not None and mask.dim() != 2)
    if is_made and asked is not None and asked.size == (batch, length):  # by generate()
        state.plan(asked.mask, batch, length, asked.dense)
    else:
        # attention follows a dense mask that others make: columns are kept as they are, padding included
        dense = is_made or not patch.switches
        state.plan(None if dense else mask, batch, length, dense)
    if state.query_length == 1:
        return patch.compiled if patch.compiled is not None and cache.is_compileable else call
    if prefill.can_pack(cache, patch.cache_name, kwargs) and patch.watch.row_watchers() is None:
        return lambda **packed: prefill.call_packed(call, cache, packed)
    return call


@untraced
def _make_traceable(model: Any, cache: PagedCache, kwargs: dict[str, Any]) -> None:
    """Make what depends on the cache's length before the compiled code runs, as generate() does for its own."""
    state = cache.state
    if not state.is_pending or not cache.is_compileable:
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    shape, device = (state.batch, state.query_length), model.get_input_embeddings().weight.device
    if positions is None and "position_ids" in inspect.signature(model.forward).parameters:
        positions = kwargs["position_ids"] = torch.arange(state.columns, state.columns + shape[1], device=device)[None]
    if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
        kwargs["attention_mask"] = make(
            config=model.config,
            inputs_embeds=torch.empty((*shape, 0), dtype=model.dtype, device=device),
            attention_mask=mask,
            position_ids=positions,
            **{cache_argument(model): cache},
        )


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
