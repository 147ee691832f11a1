"""What a patched model carries: its pool, its layers' modes, and the switch of its attention."""

from __future__ import annotations

import inspect
import threading
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..cache import LayerSpec
from . import attention, support
from .cache import PagedCache, layer_windows
from .compiling import CompiledStep
from .identity import Identity, ModelWatch
from .kv_pool import Pool
from .layers import GATHERED
from .tracing import untraced

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
            if name != attention.NAME:  # set by the user: what was dense before stays so
                attention.set_dense_implementation(config, name or "eager")

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
        try:
            if turn.depth == 1:
                patch._switch([attention.NAME] * len(patch.configs))
        except BaseException:  # an interrupt: no exit follows
            self._leave()
            raise

    @untraced
    def __exit__(self, *exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        patch, turn = self._patch, self._patch._turn
        try:
            if turn.depth == 1:
                patch._switch(patch.implementations)
        finally:
            turn.depth -= 1
            turn.lock.release()
