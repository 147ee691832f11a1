"""PagedCache: the transformers ``Cache`` whose attention layers keep their keys and values in blocks."""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from ..errors import InvalidArgumentError, refused
from ..manager import group_layers
from .kv_pool import Pool, Window
from .paged_layers import PAGED, PagedHybridLayer, PagedLayer
from .pool_size import blocks_for, check_any_fits, check_settings
from .rows import free_sequences
from .state import PagedState
from .tags import Columns

# up to 5.23 crop() also took the length to keep
_CROP_TAKES_LENGTH = Version(transformers.__version__) < Version("5.24")

_LAYER_CLASSES: dict[str, type] = {
    "full_attention": PagedLayer,
    "sliding_attention": PagedLayer,
    "chunked_attention": PagedLayer,
    "hybrid": PagedHybridLayer,
    "hybrid_sliding": PagedHybridLayer,
}
_BLOCK_SIZE = 16
_TOKEN_BYTES: dict[tuple[type, str, torch.dtype], int] = {}  # by config and type
_META_TOKENS = 128  # blocks of one token: more than any family puts before a prompt
_WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
_NATIVE = ("conv", "linear_attention", "dummy", "moe", "mlp")


def cache_argument(model: torch.nn.Module) -> str:
    """The name of the cache argument of forward: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def layer_kinds(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """The kind and the arguments of each cache layer.

    Raises:
        NotImplementedError: a layer keeps something that blocks do not hold.
    """
    kinds, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for kind in kinds:
        if kind not in _LAYER_CLASSES and kind not in _NATIVE:
            raise NotImplementedError(f"its {kind} layers cache more than keys and values per token")
    if isinstance(kwargs, dict):  # up to 5.23 one dict served all layers, each took from it what it knew
        plain = {name: value for name, value in kwargs.items() if name != "sliding_window"}
        kwargs = [kwargs if kind in _WINDOWED else plain for kind in kinds]
    return list(zip(kinds, kwargs, strict=True))


def layer_groups(kinds: list[tuple[str, dict[str, Any]]]) -> tuple[list[list[int]], list[Window]]:
    """The attention layers of each group, counted without the others, and its window; at least one group."""
    windows = [kwargs.get("sliding_window") for kind, kwargs in kinds if kind in _LAYER_CLASSES]
    groups = group_layers(windows)
    return groups, [windows[group[0]] for group in groups] or [None]


def group_windows(config: PreTrainedConfig) -> list[Window]:
    """The window of each group of a model's attention layers."""
    return layer_groups(layer_kinds(config))[1]


def _check_shared(pool: Any, windows: list[Window], block_size: int, **settings: Any) -> None:
    """Raise InvalidArgumentError for what is no pool, and for settings beside one, which has its own."""
    if not isinstance(pool, Pool):
        raise refused("pool", "a pagedkv.hf.Pool or None", pool)
    if pool.windows != windows:
        raise refused("pool", f"one of windows {windows} like the model's layers", pool)
    if block_size != pool.block_size and block_size != _BLOCK_SIZE:  # the default may stand beside any pool
        settings["block_size"] = block_size
    for name, value in settings.items():
        if value is not None:
            raise refused(f"pool, {name}", "one of them", (pool, value))


class PagedCache(Cache):  # type: ignore[misc]
    """Keys and values in blocks, for ``generate(..., cache=...)`` or a forward of a model with ``"pagedkv"`` attention.

    One object holds one batch; its blocks go back to the pool with :meth:`reset` or when it is collected. For an
    encoder-decoder model it is the self-attention part: ``EncoderDecoderCache(PagedCache(config), DynamicCache())``.

    Args:
        config: the model's config.
        block_size: tokens per block.
        num_blocks: blocks of a pool of its own, the null block included; None: sized from ``memory``. What their bytes
            are is known in the first forward, which raises for more than the device has.
        memory: bytes of that pool, or the fraction (0..1) of what is free; None: as for :func:`pagedkv.patch`.
        kv_dtype: type of the stored keys and values, as in :func:`pagedkv.patch`; None: the type they come in.
        pool: share a pool instead; excludes the arguments before.

    Raises:
        NotImplementedError: a layer keeps something that blocks do not hold; the message names it.
        InvalidArgumentError: a setting is out of its range, or settings exclude one another.
        OutOfBlocksError: in a forward that the pool has too few blocks for; nothing was changed.

    Example:
        >>> model.set_attn_implementation("pagedkv")
        >>> cache = pagedkv.PagedCache(model.config, num_blocks=64)
        >>> tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, cache=cache)
        >>> cache.get_seq_length()
        6
        >>> model.set_attn_implementation("sdpa")
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        block_size: int = _BLOCK_SIZE,
        num_blocks: int | None = None,
        memory: int | float | None = None,
        kv_dtype: torch.dtype | str | None = None,
        pool: Pool | None = None,
    ) -> None:
        block_size, num_blocks, kv_dtype = check_settings(block_size, num_blocks, memory, kv_dtype)
        if not isinstance(config, PreTrainedConfig):
            raise refused("config", "a transformers config", config)
        kinds = layer_kinds(config)
        groups, windows = layer_groups(kinds)
        if pool is None:
            text = config.get_text_config(decoder=True)
            if num_blocks is None:
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                num_blocks = blocks_for(estimated_block_bytes(config, block_size, kv_dtype), memory, device)
            else:
                check_any_fits(num_blocks, block_size, max(map(len, groups), default=0))
            max_length = getattr(text, "max_position_embeddings", None) or 2048
            pool = Pool(num_blocks, block_size, windows, max_length=max_length, kv_dtype=kv_dtype)
        else:
            _check_shared(pool, windows, block_size, num_blocks=num_blocks, memory=memory, kv_dtype=kv_dtype)
        self.config = config
        layers = []
        for kind, kwargs in kinds:
            native = DYNAMIC_LAYER_TYPE_MAPPING[kind]
            layers.append(_LAYER_CLASSES.get(kind, native)(**kwargs))
        super().__init__(layers=layers)
        paged = [layer for layer in layers if isinstance(layer, PagedLayer)]
        for number, group in enumerate(groups):
            for row, index in enumerate(group):
                paged[index].group, paged[index].row = number, row
        self._bind(PagedState(pool, paged))
        self.state.has_encoder = bool(config.is_encoder_decoder)

    def _bind(self, state: PagedState) -> None:
        self.state = state
        for layer in state.layers:
            layer.state = state
        self._finalizer = weakref.finalize(self, free_sequences, state.pool, state.seqs)

    @property
    def pool(self) -> Pool:
        return self.state.pool

    @property
    def layer_modes(self) -> list[str]:
        """Per layer: paged, gathered, or the name of the library's own layer class."""
        return [
            ("paged" if layer.mode == PAGED else "gathered") if isinstance(layer, PagedLayer) else type(layer).__name__
            for layer in self.layers
        ]

    def block_ids(self, layer_idx: int = 0) -> list[list[int]]:
        """The blocks of each row in this layer; 0 where a window has passed."""
        rows = self.state.rows
        return [] if rows is None else [list(ids) for ids in rows.blocks[self.layers[layer_idx].group]]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Plan the forward, unless a patched model did, and let the layer write."""
        layer = self.layers[layer_idx]
        if isinstance(layer, PagedLayer) and not self.state.is_planned_for(layer, key_states.shape[2]):
            self.state.write_pending()
            self.state.plan_unpatched(key_states.shape[0], key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.state.is_asked = True
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        length, offset = self.state.seen + query_length, 0
        if isinstance(layer, PagedLayer):
            length, offset = layer.get_mask_sizes(query_length)
        columns = Columns(length)
        columns.state = self.state
        return columns, offset

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.get_seq_length() if isinstance(layer, PagedLayer) else self.state.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns of every row (up to 5.23 also: keep so many columns).

        Raises:
            ValueError: a positive number from 5.24 on.
            ReleasedPositionError: a window has given back what the next token would see.
        """
        if tokens_to_remove > 0:
            if not _CROP_TAKES_LENGTH:
                raise ValueError(
                    f"crop: tokens_to_remove must be at most 0 (minus the tokens to remove), got {tokens_to_remove}"
                )
            tokens_to_remove = min(0, tokens_to_remove - self.state.seen)
        self.state.rollback(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.state.batch
        self.state.select([row for row in range(batch) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        batch = self.state.batch
        self.state.select(torch.arange(batch)[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def reset(self) -> None:
        """Give back every block; the object can hold another batch then."""
        self.state.clear()
        super().reset()

    @property
    def batch_size(self) -> int:
        return self.state.batch or -1

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A cache with the same tokens on the same blocks; each copies a block before it writes into it."""
        other = copy.copy(self)
        memo[id(self)] = other
        other.layers = []
        for layer in self.layers:
            twin = copy.copy(layer)
            if isinstance(layer, PagedLayer):
                twin.step = twin.pending = None
            if type(layer) is not PagedLayer:
                names = [name for name in vars(twin) if name not in ("state", "step", "key_cache", "value_cache")]
                vars(twin).update({name: copy.deepcopy(vars(layer)[name], memo) for name in names})
            other.layers.append(twin)
        other._bind(self.state.copy([layer for layer in other.layers if isinstance(layer, PagedLayer)]))
        return other


def estimated_block_bytes(config: PreTrainedConfig, block_size: int, kv_dtype: torch.dtype | None) -> int:
    """Bytes of a block over all layers, as a forward on the meta device shows them: seconds for a large model, once.

    Raises:
        InvalidArgumentError: the model cannot be built or run there.
    """
    text = config.get_text_config(decoder=True)
    dtype = kv_dtype or getattr(text, "dtype", None) or torch.float32
    key = type(text), text.to_json_string(use_diff=False), dtype
    if key not in _TOKEN_BYTES:
        _TOKEN_BYTES[key] = _token_bytes(copy.deepcopy(text), dtype)
    return block_size * _TOKEN_BYTES[key]


class _Yes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what models ask of values that are not there: whether a mask is of ones, a number in its range."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        return function(*args, **kwargs or {})


def _token_bytes(config: PreTrainedConfig, kv_dtype: torch.dtype) -> int:
    own = PagedCache(config, block_size=1, num_blocks=_META_TOKENS, kv_dtype=kv_dtype)
    cache = EncoderDecoderCache(own, DynamicCache()) if config.is_encoder_decoder else own
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    try:
        with torch.device("meta"), torch.no_grad(), _Yes():  # type: ignore[no-untyped-call]
            # there is no product of experts but in bfloat16 there
            is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
            auto = AutoModelForCausalLM if is_causal else AutoModel
            model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
            ids = dict.fromkeys(names, torch.ones((1, 2), dtype=torch.long))
            model(**ids, use_cache=True, **{cache_argument(model): cache})
    except Exception as error:  # whatever a model's own code does not find there
        unknown = f"what a block of {config.model_type} takes is not known before its first forward"
        raise InvalidArgumentError(f"num_blocks: expected a number, as {unknown} ({error}), got None") from error
    return own.pool.block_bytes
