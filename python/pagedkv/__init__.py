"""Paged KV memory for PyTorch models: manager, cache, transformers patch and engine over ``torch.ops.pagedkv``.

Names are resolved on first use, so that ``pagedkv.block_pool`` and ``pagedkv.manager`` work without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block_pool import BlockPool as BlockPool
    from .cache import LayerSpec as LayerSpec
    from .cache import PagedKVCache as PagedKVCache
    from .engine import Engine as Engine
    from .errors import InvalidArgumentError as InvalidArgumentError
    from .errors import OutOfBlocksError as OutOfBlocksError
    from .errors import PagedKVError as PagedKVError
    from .hf import PagedCache as PagedCache
    from .hf import UnsupportedModelError as UnsupportedModelError
    from .hf import clear_prefix_cache as clear_prefix_cache
    from .hf import layer_modes as layer_modes
    from .hf import patch as patch
    from .hf import patched as patched
    from .hf import pool as pool
    from .hf import unpatch as unpatch
    from .manager import GroupSpec as GroupSpec
    from .manager import KVCacheManager as KVCacheManager
    from .manager import group_layers as group_layers

_HOME = {
    "BlockPool": "block_pool",
    "Engine": "engine",
    "GroupSpec": "manager",
    "InvalidArgumentError": "errors",
    "KVCacheManager": "manager",
    "LayerSpec": "cache",
    "OutOfBlocksError": "errors",
    "PagedCache": "hf",
    "PagedKVCache": "cache",
    "PagedKVError": "errors",
    "UnsupportedModelError": "hf",
    "clear_prefix_cache": "hf",
    "group_layers": "manager",
    "layer_modes": "hf",
    "patch": "hf",
    "patched": "hf",
    "pool": "hf",
    "unpatch": "hf",
}

_MODULES = (
    "block_pool",
    "block_table",
    "cache",
    "engine",
    "errors",
    "hf",
    "integrations",
    "manager",
    "tensor_parallel",
)

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import version  # 20 ms to import, which only this name needs

        return version("pagedkv")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
