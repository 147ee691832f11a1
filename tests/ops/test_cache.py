"""PagedKVCache refuses settings that no op could use; test_library_step.py uses it."""

from __future__ import annotations

import re

import pytest
import torch

from pagedkv import LayerSpec, PagedKVCache
from pagedkv.errors import InvalidArgumentError

LAYER = LayerSpec(2, 8)
TYPES = "torch.float32, torch.float16, torch.bfloat16, 'int8', 'fp8_e4m3' or 'fp8_e5m2'"
EACH_ONCE = "lists of indices that name each of 2 layers once"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 4, [LAYER]), {}, "num_blocks: expected at least 2 (one is the null block), got 1"),
        (("x", 4, [LAYER]), {}, "num_blocks: expected an int, got 'x'"),
        ((2**60, 4, [LAYER]), {}, f"num_blocks: expected at most {2**31}, got {2**60}"),
        ((4, 0, [LAYER]), {}, "block_size: expected at least 1, got 0"),
        ((4, 2.0, [LAYER]), {}, "block_size: expected an int, got 2.0"),
        ((4, 4, [LAYER]), {"num_host_blocks": -1}, "num_host_blocks: expected at least 0, got -1"),
        ((4, 4, [LAYER]), {"num_host_blocks": "x"}, "num_host_blocks: expected an int, got 'x'"),
        ((4, 4, [LAYER]), {"layout": "DNH"}, "layout: expected 'HND' or 'NHD', got 'DNH'"),
        ((4, 4, []), {}, "layers: expected at least one LayerSpec, got []"),
        ((4, 4, 5), {}, "layers: expected a sequence of LayerSpecs, got 5"),
        ((4, 4, [LAYER, "x"]), {}, "layers[1]: expected a LayerSpec, got 'x'"),
        ((4, 4, [LayerSpec(0, 8)]), {}, "layers[0].num_kv_heads: expected at least 1, got 0"),
        ((4, 4, [LayerSpec(2, -8)]), {}, "layers[0].head_size: expected at least 1, got -8"),
        ((4, 4, [LayerSpec(2, None)]), {}, "layers[0].head_size: expected an int, got None"),
        ((4, 4, [LayerSpec(2, 8, 0)]), {}, "layers[0].v_head_size: expected at least 1, got 0"),
        (
            (4, 4, [LAYER, LayerSpec(2, 8, dtype=torch.uint8)]),
            {},
            f"layers[1].dtype: expected {TYPES}, got torch.uint8",
        ),
        ((4, 4, [LayerSpec(2, 8, dtype=torch.float64)]), {}, f"layers[0].dtype: expected {TYPES}, got torch.float64"),
        ((4, 4, [LAYER] * 2), {"groups": [[0]]}, f"groups: expected {EACH_ONCE}, got [[0]]"),
        ((4, 4, [LAYER] * 2), {"groups": [[0], [0]]}, f"groups: expected {EACH_ONCE}, got [[0], [0]]"),
        ((4, 4, [LAYER] * 2), {"groups": [0, 1]}, f"groups: expected {EACH_ONCE}, got 0"),
        (
            (4, 4, [LAYER, LayerSpec(1, 8)]),
            {"groups": [[0], [1]]},
            "groups: expected equal specs of the layers that share tensors, got " + repr([LAYER, LayerSpec(1, 8)]),
        ),
    ],
)
def test_settings_are_refused_by_name(arguments, options, message):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        PagedKVCache(*arguments, **options)
