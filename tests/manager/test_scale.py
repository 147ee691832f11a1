"""Long sequences, large pools, and what an import costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pagedkv.block_pool import BlockPool
from pagedkv.manager import GroupSpec, KVCacheManager

MILLION = 1_000_000


@pytest.mark.parametrize("module", ["block_pool", "manager"])
def test_import_without_torch(module):
    code = f"import sys, pagedkv.{module}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sequence_of_a_million_tokens():
    manager = KVCacheManager(2 * MILLION // 16, 16)
    tokens = np.arange(MILLION)
    manager.add("a", tokens)
    granted = manager.allocate_slots("a")
    assert len(granted.slots) == MILLION
    manager.commit("a", MILLION)
    manager.check_integrity()
    for token in range(40):
        manager.append("a", [token])
        assert len(manager.allocate_slots("a", 1).slots) == 1
        manager.commit("a", 1)
    manager.add("b", tokens)
    assert manager.allocate_slots("b").num_cached_tokens == MILLION - 16
    manager.fork("a", "c")
    manager.truncate("c", MILLION // 2)
    manager.reorder(["a", "b", "c"], [2, 0, 1])
    assert manager.preempt("b") == "recompute"
    manager.check_integrity()
    assert manager.stats().num_used_blocks == MILLION // 16 - 1  # what was "b" and is "c"
    for name in "abc":
        manager.free(name)
    manager.check_integrity()
    assert manager.reset_prefix_cache()
    assert manager.num_free_blocks == manager.pool.num_usable


def test_pool_of_a_million_blocks():
    pool = BlockPool(MILLION)
    blocks = pool.get_new_blocks(MILLION - 1)
    assert blocks == list(range(1, MILLION))
    pool.free_blocks(blocks[::-1])
    pool.check_integrity()
    assert pool.get_new_blocks(3) == [1, 2, 3]


def test_windowed_prompt_of_a_million_tokens():
    manager = KVCacheManager(1000, 16, groups=[GroupSpec("sliding", 1024)])
    manager.add("a", np.arange(MILLION // 4))
    while manager.num_computed_tokens("a") < MILLION // 4:
        slots = manager.allocate_slots("a", 8192).slots[0]
        manager.commit("a", len(slots))
    manager.check_integrity()
    manager.free("a")
    assert manager.match_prefix(np.arange(MILLION // 4)) == MILLION // 4 - 16
