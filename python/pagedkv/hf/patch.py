"""``patch``, ``unpatch`` and ``patched``: a model's ``generate`` on blocks, undone without a trace."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cache import LayerSpec
from . import masks, prefill, prefix, support
from .cache import PagedCache, layer_windows
from .layers import GATHERED
from .pool import Pool
from .sizing import blocks_for

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
_ATTRIBUTE = "_pagedkv_patch"
_PROBE_BLOCKS = 32


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument of forward: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def placement(model: PreTrainedModel) -> Any:
    """Where the weights are and of which types: what a layer's keys and values follow."""
    return {(parameter.device, parameter.dtype) for parameter in model.parameters()}


class Patch:
    """What a patched model carries: the pool, the layers' modes, and the switch of its attention."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.options = options
        self.configs = support.text_configs(model)
        self.cache_name = cache_argument(model)
        self.original_class = type(model)
        self.implementations = [config._attn_implementation for config in self.configs]
        self.switches = support.uses_interface(model, self.configs)
        self.layers: list[tuple[str, LayerSpec | None]] = []  # mode, and shapes, as the first run found them
        self.placement: Any = None
        self.pool: Pool
        self.compiled: Any = None
        self.prefix = prefix.PrefixKeys()
        self._depth = 0
        self._lock = threading.RLock()
        self._local = threading.local()

    def set_pool(self, model: PreTrainedModel, num_blocks: int, prefix_caching: bool) -> None:
        text = model.config.get_text_config(decoder=True)
        self.pool = Pool(
            num_blocks,
            self.options["block_size"],
            layer_windows(model.config),
            max_length=getattr(text, "max_position_embeddings", None) or 2048,
            kv_dtype=self.options["kv_dtype"],
            prefix_caching=prefix_caching,
        )

    def new_cache(self, model: PreTrainedModel) -> PagedCache:
        cache = PagedCache(model.config, pool=self.pool)
        if not self.switches:
            for layer in cache.state.layers:
                layer.mode = GATHERED
        if self.layers:
            same_placement = self.placement == placement(model)
            for layer, (mode, spec) in zip(cache.state.layers, self.layers, strict=True):
                layer.mode, layer.spec = mode, spec if same_placement else None
        return cache

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Within it the model's attention layers call this library; outside they are as they were."""
        with self._lock:  # the buffers of a decode step and the pool serve one call at a time: threads take turns
            self._depth += 1
            if self._depth == 1:
                self._switch([masks.NAME] * len(self.configs))
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._switch(self.implementations)

    def _switch(self, names: list[str | None]) -> None:
        if self.switches:
            for config, name in zip(self.configs, names, strict=True):
                config._attn_implementation_internal = name

    @property
    def created(self) -> list[PagedCache]:
        """Caches that the running generate call of this thread has made."""
        if not hasattr(self._local, "created"):
            self._local.created = []
        return self._local.created  # type: ignore[no-any-return]

    def release(self, since: int, output: Any) -> None:
        """Give back the blocks of caches made since then, but for one that the caller gets."""
        kept = output.get(self.cache_name) if hasattr(output, "keys") else None
        for cache in self.created[since:]:
            if cache is not kept:
                cache.reset()
        del self.created[since:]


class _PatchedMethods:
    """Methods of a patched model, in front of those of its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        patch: Patch | None = self.__dict__.get(_ATTRIBUTE)
        cache = None if patch is None else kwargs.get(patch.cache_name)
        if patch is None or not isinstance(cache, PagedCache) or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with patch.attention():
            _plan(self, patch, cache, kwargs)
            if patch.compiled is not None and cache.state.query_length == 1 and cache.is_compileable:
                call = patch.compiled
            elif cache.state.query_length > 1 and prefill.can_pack(cache, patch.cache_name, kwargs):
                return prefill.call_packed(call, cache, kwargs)
            return call(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        patch: Patch = self.__dict__[_ATTRIBUTE]
        since, output = len(patch.created), None
        try:
            with patch.attention():
                output = super().generate(*args, **kwargs)  # type: ignore[misc]
            return output
        finally:
            patch.release(since, output)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(self.__dict__[_ATTRIBUTE].cache_name)
        if isinstance(cache, PagedCache):
            embedded = kwargs.get("inputs_embeds") is not None and cache.state.seen == 0
            cache.state.token_ids = None if embedded else input_ids
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        patch: Patch = self.__dict__[_ATTRIBUTE]
        given = model_kwargs.get(patch.cache_name)
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]
        native = model_kwargs.get(patch.cache_name)
        wants_weights = generation_config.output_attentions
        if given is not None or type(native) is not DynamicCache or native.offloading or wants_weights:
            return result
        cache = model_kwargs[patch.cache_name] = patch.new_cache(self)
        patch.created.append(cache)
        cache.state.copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if any(getattr(layer, "record_past", False) for layer in native.layers):
            cache.activate_past_recording()
        return result

    def _prefill(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        patch: Patch = self.__dict__[_ATTRIBUTE]
        cache = model_kwargs.get(patch.cache_name)
        if patch.pool.prefix_caching and isinstance(cache, PagedCache):
            prefix.attach(self, patch.prefix, cache, input_ids, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the unpatched model."""
        state = {name: value for name, value in self.__dict__.items() if name != _ATTRIBUTE}
        return _new, (self.__dict__[_ATTRIBUTE].original_class,), state


def _plan(model: Any, patch: Patch, cache: PagedCache, kwargs: dict[str, Any]) -> None:
    """Plan the forward that is about to run, whatever kind of mask it was given."""
    state = cache.state
    inputs = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs.get("input_ids")
    if inputs is None:
        return
    if state.is_pending and state.query_length == inputs.shape[1]:
        return  # generate() has made the masks, and with them the plan
    if kwargs.get("input_ids") is not None and (state.token_ids is None or state.seen == 0):
        state.token_ids = inputs
    mask = kwargs.get("attention_mask")
    if not patch.switches or isinstance(mask, dict) or (mask is not None and mask.dim() != 2):
        # attention follows a dense mask that others make: columns are kept as they are, padding included
        state.plan(None, inputs.shape[0], inputs.shape[1], dense=True)
    else:
        state.plan(mask, inputs.shape[0], inputs.shape[1])


def _new(original: Any) -> Any:
    return original.__new__(original)


@functools.cache
def _patched_class(original: Any) -> type:
    names: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    for name, method in vars(_PatchedMethods).items():
        if isinstance(method, FunctionType) and hasattr(original, name) and not name.startswith("__"):
            # generate() looks at the signatures of methods
            names[name] = FunctionType(method.__code__, method.__globals__, name, None, method.__closure__)
            names[name].__signature__ = inspect.signature(getattr(original, name))
    return type(original.__name__, (_PatchedMethods, original), names)


def _target(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled module or an adapter model."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"pagedkv: model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def patch(
    model: Model,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    memory: int | float | None = None,
    kv_dtype: torch.dtype | None = None,
    prefix_caching: bool = False,
    compile: bool | dict[str, Any] = False,
) -> Model:
    """Let ``model.generate`` keep its KV cache in blocks; the tokens stay those of the unpatched model.

    A short generation is run with the model's own cache and with blocks and compared, so that a model which blocks can
    not serve is refused here. Patching a patched model again with the same settings does nothing. Calls from several
    threads take turns.

    Args:
        model: a transformers causal language model, also inside a PEFT or a compiled module.
        block_size: tokens per block.
        num_blocks: blocks of the model's pool, the null block included; None: from ``memory``.
        memory: bytes of the pool, or the fraction (0..1) of what is free; None: on CUDA 0.8 of what is free now, on CPU
            half of it, which is reserved and touched only as blocks are used; at most 65,536 blocks.
        kv_dtype: float type of the stored keys and values; None: the type the model computes them in.
        prefix_caching: prompts that begin like an earlier one reuse its blocks (:func:`clear_prefix_cache`).
        compile: run decode steps through ``torch.compile``, with these options if it is a dict.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: blocks can not serve the model; it is left as it was, and the message says why.
        ValueError: the model is patched with other settings, or a setting is out of its range.
    """
    options = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "memory": memory,
        "kv_dtype": kv_dtype,
        "prefix_caching": prefix_caching,
        "compile": compile,
    }
    _check_options(num_blocks, memory, kv_dtype)
    target = _target(model)
    known: Patch | None = target.__dict__.get(_ATTRIBUTE)
    if known is not None:
        if known.options != options:
            raise ValueError(f"pagedkv: the model is patched with {known.options}; unpatch it first to use {options}")
        return model
    support.check_model(target)
    handle = Patch(target, options)
    for config, name in zip(handle.configs, handle.implementations, strict=True):
        if name != masks.NAME:  # set by the user: what was dense before stays so
            masks.set_dense_implementation(config, name or "eager")
    target.__dict__[_ATTRIBUTE] = handle
    target.__class__ = _patched_class(type(target))  # type: ignore[arg-type]
    try:
        _probe(target, handle)
        _size_pool(target, handle)
    except BaseException:
        unpatch(model)
        raise
    if compile:
        step = functools.partial(handle.original_class.__call__, target)
        handle.compiled = torch.compile(step, **(compile if isinstance(compile, dict) else {}))
    return model


def _check_options(num_blocks: Any, memory: Any, kv_dtype: Any) -> None:
    if num_blocks is not None and (not isinstance(num_blocks, int) or num_blocks < 2):
        raise ValueError(
            f"pagedkv: num_blocks must be an int of at least 2 (one is the null block), got {num_blocks!r}"
        )
    if memory is not None and (not isinstance(memory, int | float) or memory <= 0):
        raise ValueError(f"pagedkv: memory must be bytes or a fraction above 0, got {memory!r}")
    if kv_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"pagedkv: kv_dtype must be None, float32, float16 or bfloat16 of torch, got {kv_dtype!r}")


def _probe(model: PreTrainedModel, handle: Patch) -> None:
    """Run both ways, compare, and learn each layer's mode."""
    inputs = support.probe_inputs(model)
    handle.set_pool(model, _PROBE_BLOCKS, prefix_caching=False)
    with support.evaluation(model):
        try:
            own_cache = {handle.cache_name: DynamicCache(config=model.config)}
            native = handle.original_class.generate(model, **inputs, **own_cache)
        except Exception as error:
            reason = f"it does not generate from token ids alone ({type(error).__name__}: {error})"
            raise support.refuse(model, reason) from error
        try:
            _probe_paged(model, handle, inputs, native)
        except Exception:
            if not handle.switches:
                raise
            # it does something to its masks or keys that the attention function can not see: leave its attention alone
            handle.switches = False
            handle.set_pool(model, _PROBE_BLOCKS, prefix_caching=False)
            _probe_paged(model, handle, inputs, native)


def _probe_paged(model: PreTrainedModel, handle: Patch, inputs: dict[str, Any], native: Any) -> None:
    cache = handle.new_cache(model)
    try:
        paged = model.generate(**inputs, **{handle.cache_name: cache})
    except Exception as error:
        raise support.refuse(model, f"{type(error).__name__}: {error}") from error
    support.compare(model, native, paged, cache)
    handle.layers = [(layer.mode, layer.spec) for layer in cache.state.layers]
    handle.placement = placement(model)
    cache.reset()


def _size_pool(model: PreTrainedModel, handle: Patch) -> None:
    options = handle.options
    device = model.get_input_embeddings().weight.device
    num_blocks = options["num_blocks"]
    if num_blocks is None:
        num_blocks = blocks_for(handle.pool.block_bytes, options["memory"], device)
    caching = options["prefix_caching"] and prefix.allowed(model, handle.new_cache(model))
    handle.set_pool(model, num_blocks, caching)


def unpatch(model: Model) -> Model:
    """Give a model back its own ``generate`` and attention. Caches that it returned can not be continued after it."""
    target = _target(model)
    handle: Patch | None = target.__dict__.pop(_ATTRIBUTE, None)
    if handle is not None:
        target.__class__ = handle.original_class
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """``with patched(model): ...``: :func:`patch` on entry, :func:`unpatch` on exit if it was not patched before."""
    was_patched = _ATTRIBUTE in _target(model).__dict__
    try:
        yield patch(model, **options)
    finally:
        if not was_patched:
            unpatch(model)


def pool(model: Any) -> Pool:
    """The pool of a patched model.

    Raises:
        ValueError: the model is not patched.
    """
    handle: Patch | None = _target(model).__dict__.get(_ATTRIBUTE)
    if handle is None:
        raise ValueError(f"pagedkv: {type(_target(model)).__name__} is not patched")
    return handle.pool


def clear_prefix_cache(model: Any) -> None:
    """Forget the prefixes of a patched model. Needed after changes that do not show in its parameters."""
    pool(model)
    _target(model).__dict__[_ATTRIBUTE].prefix.clear()


def layer_modes(model: Any) -> list[str]:
    """Per layer of a patched model: paged, gathered, or the library's own layer class.

    Raises:
        ValueError: the model is not patched.
    """
    pool(model)
    return support.modes(_target(model).__dict__[_ATTRIBUTE].new_cache(_target(model)))
