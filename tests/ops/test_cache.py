"""PagedKVCache: settings that no op could use are refused, groups share tensors, blocks move to the host and back."""

from __future__ import annotations

import pytest
import torch

from pagedkv import LayerSpec, PagedKVCache

LAYER = LayerSpec(2, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 4, [LAYER]), {}, "num_blocks must be at least 2"),
        ((4, 0, [LAYER]), {}, "block_size at least 1"),
        ((4, 4, []), {}, "0 layers"),
        ((4, 4, [LAYER]), {"layout": "DNH"}, "layout must be HND or NHD"),
        ((4, 4, [LayerSpec(0, 8)]), {}, "at least 1 head"),
        ((4, 4, [LayerSpec(2, -8)]), {}, "at least 1 head"),
        ((4, 4, [LayerSpec(2, 8, dtype=torch.int8)]), {}, "float type"),
        ((4, 4, [LAYER] * 2), {"groups": [[0]]}, "name each of 2 layers once"),
        ((4, 4, [LAYER, LayerSpec(1, 8)]), {"groups": [[0], [1]]}, "unequal specs"),
    ],
)
def test_settings_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(*arguments, **options)


def test_groups_share_tensors_and_memory():
    shared = PagedKVCache(4, 4, [LAYER] * 4, groups=[[0, 1], [2, 3]])
    assert shared.key_caches[0] is shared.key_caches[2]
    assert shared.key_caches[0] is not shared.key_caches[1]
    assert shared.nbytes * 2 == PagedKVCache(4, 4, [LAYER] * 4).nbytes


def test_blocks_move_to_the_host_and_back():
    cache = PagedKVCache(6, 4, [LAYER] * 2, num_host_blocks=2)
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(tensor))
    cache.apply(([(5, 1)], [(1, 1)]), [(2, 5), (3, 2)])  # out to host 1, copies, back from host 1 into block 1
    for tensor in (*cache.key_caches, *cache.value_caches):
        assert tensor[:, 0, 0, 0].tolist() == [0.0, 5.0, 3.0, 3.0, 4.0, 2.0]
