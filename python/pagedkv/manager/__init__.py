"""Sequences of tokens on reference-counted blocks. Integers and token ids only; no torch.

Each module imports only those before it::

    tokens hashing groups blocks index pool moves sequence state search commits sharing allocation steps
    inspection manager
"""

from __future__ import annotations

from pagedkv.manager.allocation import Allocation
from pagedkv.manager.groups import GroupSpec, group_layers
from pagedkv.manager.inspection import KVCacheStats, PrefixExplanation
from pagedkv.manager.manager import KVCacheManager
from pagedkv.manager.steps import DecodeStep

__all__ = [
    "Allocation",
    "DecodeStep",
    "GroupSpec",
    "KVCacheManager",
    "KVCacheStats",
    "PrefixExplanation",
    "group_layers",
]
