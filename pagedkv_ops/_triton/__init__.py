"""The CUDA implementations: one Triton launcher per op, with its name and arguments; imported at the first CUDA call.

Under ``TRITON_INTERPRET=1``, set before Triton is imported, they run on CPU tensors: that is how they are tested.
"""

from .attention import paged_attention, paged_attention_append, paged_attention_with_lse
from .blocks import copy_blocks
from .gathering import gather_kv
from .states import merge_states
from .swapping import swap_blocks
from .writing import write_kv

__all__ = [
    "copy_blocks",
    "gather_kv",
    "merge_states",
    "paged_attention",
    "paged_attention_append",
    "paged_attention_with_lse",
    "swap_blocks",
    "write_kv",
]
