"""assert_no_cache_clone finds what it is for, and nothing else."""

from __future__ import annotations

import pytest
import torch

import pagedkv_ops
from pagedkv_ops.testing import assert_no_cache_clone, poison

TOKENS = torch.randn(2, 2, 8)
SLOTS = torch.tensor([4, 8])


def write(key, key_cache, value_cache, slots):
    pagedkv_ops.write_kv(key, key * 2, key_cache, value_cache, slots)
    return key_cache[1, 0] + 1


def caches(num_blocks: int = 32):
    return poison(num_blocks, 4, 2, 8), poison(num_blocks, 4, 2, 8)


def test_clean_step_passes_and_its_arguments_stay_as_they_were():
    key_cache, value_cache = caches()
    assert_no_cache_clone(write, TOKENS, key_cache, value_cache, SLOTS)
    assert torch.isnan(key_cache).all()
    assert torch.isnan(value_cache).all()


def written_clone(key, key_cache, value_cache, slots):
    old = key_cache.clone()
    write(key, key_cache, value_cache, slots)
    return old.sum(), key_cache.sum(), old


def computed_copy(key, key_cache, value_cache, slots):
    scaled = key_cache * 2
    pagedkv_ops.write_kv(key, key, scaled, value_cache, slots)
    return scaled


def half_a_pool(key, pool, slots):
    """One layer's keys count as a cache, also where they are part of a stacked pool."""
    pagedkv_ops.write_kv(key, key, pool[0], pool[1], slots)
    return pool[0] + 1


def gather_of_every_block(key, key_cache, value_cache, slots):
    """Inductor allocates nothing, the op does."""
    write(key, key_cache, value_cache, slots)
    return pagedkv_ops.gather_kv(key_cache, torch.arange(32)[None], torch.tensor([0]), 128)


@pytest.mark.parametrize(
    ("step", "tensors", "line"),
    [
        (written_clone, caches(), r"buf\d+ = empty_strided_cpu\(\(2048"),
        (computed_copy, caches(), "buf"),
        (half_a_pool, (poison(2, 32, 4, 2, 8),), "buf"),
        (gather_of_every_block, caches(), r"assert_size_stride\(buf\d+"),
        (write, tuple(poison(2, 32, 4, 2, 8)), "buf"),  # views that share storage: Inductor clones them
    ],
)
def test_finds(step, tensors, line):
    with pytest.raises(AssertionError, match=f"at least a cache's 2048 elements: {line}"):
        assert_no_cache_clone(step, TOKENS, *tensors, SLOTS)


def test_caches_of_other_ranks_are_named():
    latents = poison(32, 4, 16)

    def step(source, cache, mapping):
        pagedkv_ops.copy_blocks([cache], mapping)
        return cache * source

    args = (torch.tensor(2.0), latents, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="no argument has four dimensions"):
        assert_no_cache_clone(step, *args)
    with pytest.raises(AssertionError, match="at least a cache's"):
        assert_no_cache_clone(step, *args, caches=[latents])


def test_a_function_without_ops_is_an_error():
    with pytest.raises(AssertionError, match="no code"):
        assert_no_cache_clone(lambda key_cache: None, caches()[0])
