"""Run by a bare interpreter against an installed wheel: compiled write and attention equal dense attention.

Usage, from any directory but the repository: ``python smoke.py``. Needs torch, numpy and the wheel; no test tools.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import pagedkv_ops
from pagedkv import KVCacheManager, LayerSpec, PagedKVCache


def attend(query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, slots: Tensor, table: Tensor) -> Tensor:
    key_cache, value_cache = cache.key_caches[0], cache.value_caches[0]
    torch.ops.pagedkv.write_kv(key, value, key_cache, value_cache, slots)
    seq_lens = torch.tensor([len(query)])
    bounds = torch.tensor([0, len(query)])
    return torch.ops.pagedkv.paged_attention(query, key_cache, value_cache, table, seq_lens, bounds)


def main() -> None:
    length, num_heads, num_kv_heads, head_size = 37, 8, 2, 64
    cache = PagedKVCache(8, 16, [LayerSpec(num_kv_heads, head_size)])
    manager = KVCacheManager(8, 16)
    manager.add("prompt", list(range(length)))
    allocation = manager.allocate_slots("prompt")
    assert allocation is not None
    query = torch.randn(length, num_heads, head_size)
    key, value = torch.randn(2, length, num_kv_heads, head_size).unbind()
    slots, table = torch.tensor(allocation.slots), torch.tensor([allocation.block_ids])
    heads_first = [t.transpose(0, 1) for t in (query, key, value)]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(0, 1)
    for run in (attend, torch.compile(attend, fullgraph=True)):
        torch.testing.assert_close(run(query, key, value, cache, slots, table), expected, rtol=1e-4, atol=1e-5)
    installed = Path(pagedkv_ops.__file__).parent
    assert installed.parent.name == "site-packages", f"not the installed wheel: {installed}"
    print(f"torch {torch.__version__}, {pagedkv_ops.backends()['cpu']}: the wheel works")


if __name__ == "__main__":
    with torch.no_grad():
        main()
