"""What a patched model carries: its pool, its layers' modes, and the switch of its attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import LayerSpec
from . import attention
from .cache import PagedCache, cache_argument, group_windows
from .compiling import CompiledStep
from .identity import Identity, ModelWatch
from .kv_pool import Pool
from .paged_layers import GATHERED
from .untraced import skipped, untraced

Result = TypeVar("Result")
ATTRIBUTE = "_pagedkv_patch"


def placement(model: PreTrainedModel) -> Any:
    """Where the weights are and of which types: what a layer's keys and values follow."""
    return {(parameter.device, parameter.dtype) for parameter in model.parameters()}


class _Turn:
    """Whose turn it is with a model: its attention is switched for all of its patches and engines at once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_switched = False


_TURNS: WeakKeyDictionary[PreTrainedModel, _Turn] = WeakKeyDictionary()


class Patch:
    """What a patched model carries: the pool, the layers' modes, and the switch of its attention."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.options = options
        self.find_configs(model)
        self.cache_name = cache_argument(model)
        self.original_class = type(model)
        self.switches = _uses_interface(model, self.configs)
        self.layers: list[tuple[str, LayerSpec | None]] = []  # mode, and shapes, as the first run found them
        self.placement: Any = None
        self.pool: Pool
        self.compiled: CompiledStep | None = None
        self.watch = ModelWatch(model)
        self._num_surveys = self.watch.num_surveys
        self._turn = _TURNS.setdefault(model, _Turn())
        self.created: list[PagedCache] | None = None  # by the call of generate that is under way

    def set_pool(self, model: PreTrainedModel, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        text = model.config.get_text_config(decoder=True)
        self.pool = Pool(
            num_blocks,
            block_size,
            group_windows(model.config),
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
            count = len(cache.state.layers)
            if count != len(self.layers):
                raise ValueError(
                    f"pagedkv: {type(model).__name__} was patched with {len(self.layers)} attention layers, and its "
                    f"config or the cache has {count}: unpatch it and patch it again"
                )
            same_placement = self.placement == placement(model) and cache.pool.kv_dtype == self.pool.kv_dtype
            for layer, (mode, spec) in zip(cache.state.layers, self.layers, strict=True):
                layer.mode, layer.spec = mode, spec if same_placement else None

    @untraced
    def follow_model(self, model: PreTrainedModel) -> Identity:
        """Notice what has changed in a model since its last call, before the next one begins."""
        with self._turn.lock:
            identity = self.watch.inspect()
            if self.watch.num_surveys != self._num_surveys and not self._turn.is_switched:
                self._num_surveys = self.watch.num_surveys
                self.find_configs(model)  # a new layer may read a config of its own
                self.placement = None  # a layer that is gone would be waited for
            if self.compiled is not None:
                self.compiled.follow()
        return identity

    def find_configs(self, model: PreTrainedModel) -> None:
        """The configs that name the attention of the model's layers, and what they name while nobody is switched."""
        self.configs = _text_configs(model)
        self.implementations = [config._attn_implementation for config in self.configs]
        for config, name in zip(self.configs, self.implementations, strict=True):
            if name != attention.NAME:  # set by the user: what was dense before stays so
                attention.set_dense_implementation(config, name or "eager")

    @skipped
    def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function within which the model's attention layers call this library; outside they are as they were.

        The buffers of a decode step and the pool serve one call at a time: threads take turns.
        """
        turn = self._turn
        with turn.lock:
            if turn.is_switched:
                return function(*args, **kwargs)
            try:
                try:
                    turn.is_switched = True
                    self._switch([attention.NAME] * len(self.configs))
                    return function(*args, **kwargs)
                finally:
                    self._switch_back()
            finally:  # an interrupt within the line above
                self._switch_back()

    @untraced
    def _switch(self, names: list[str | None]) -> None:
        if self.switches:
            for config, name in zip(self.configs, names, strict=True):
                config._attn_implementation_internal = name

    @untraced
    def _switch_back(self) -> None:
        if self._turn.is_switched:
            self._switch(self.implementations)
            self._turn.is_switched = False

    def release(self, caches: list[PagedCache], output: Any) -> None:
        """Give back the blocks of caches, but for one that the caller gets."""
        kept = output.get(self.cache_name) if hasattr(output, "keys") else None
        for cache in caches:
            if cache is not kept:
                cache.reset()


def _text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The config objects that the text model's attention layers read: usually one, sometimes copies."""
    text = model.config.get_text_config(decoder=True)
    configs = [text]
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is type(text) and not any(config is known for known in configs):
            configs.append(config)
    return configs


def _uses_interface(model: PreTrainedModel, configs: list[PreTrainedConfig]) -> bool:
    """The attention layers look their function up by ``config._attn_implementation``."""
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel) and any(m.config is c for c in configs)]
    return bool(owners) and all(type(owner)._can_set_attn_implementation() for owner in owners)
