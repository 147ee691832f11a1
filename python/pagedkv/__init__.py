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
    from .hf import PagedCache as PagedCache
    from .hf import clear_prefix_cache as clear_prefix_cache
    from .hf import patch as patch
    from .hf import patched as patched
    from .hf import pool as pool
    from .hf import unpatch as unpatch
    from .manager import GroupSpec as GroupSpec
    from .manager import KVCacheManager as KVCacheManager

_HOME = {
    "BlockPool": "block_pool",
    "Engine": "engine",
    "GroupSpec": "manager",
    "KVCacheManager": "manager",
    "LayerSpec": "cache",
    "PagedCache": "hf",
    "PagedKVCache": "cache",
    "clear_prefix_cache": "hf",
    "patch": "hf",
    "patched": "hf",
    "pool": "hf",
    "unpatch": "hf",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
