"""transformers on blocks: importing this registers the attention and mask functions ``"pagedkv"``."""

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import NAME, paged_attention, paged_mask
from .cache import PagedCache
from .kv_pool import Pool
from .patching import clear_prefix_cache, layer_modes, patch, patched, pool, unpatch
from .refusals import UnsupportedModelError

ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, paged_mask)

__all__ = [
    "PagedCache",
    "Pool",
    "UnsupportedModelError",
    "clear_prefix_cache",
    "layer_modes",
    "patch",
    "patched",
    "pool",
    "unpatch",
]
