"""Paged KV-cache ops for PyTorch: importing this package registers ``torch.ops.pagedkv.*``.

Each function here is a thin, documented name for the op of the same name. ``reference`` holds their specification,
``testing`` helpers for tests of models that use them.
"""

from pathlib import Path

from .attention import paged_attention, paged_attention_append, paged_attention_with_lse
from .backends import backends
from .blocks import copy_blocks, gather_kv, swap_blocks
from .states import merge_states
from .warming import warm_up
from .writing import write_kv

__all__ = [
    "backends",
    "cmake_prefix_path",
    "copy_blocks",
    "gather_kv",
    "merge_states",
    "paged_attention",
    "paged_attention_append",
    "paged_attention_with_lse",
    "swap_blocks",
    "warm_up",
    "write_kv",
]

cmake_prefix_path = str(Path(__file__).parent / "cmake")
"""Where CMake finds the package ``pagedkv``, whose target ``pagedkv::ops`` brings the ops into C++ programs."""
