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


def test_finds_a_written_clone():
    def step(key, key_cache, value_cache, slots):
        old = key_cache.clone()
        write(key, key_cache, value_cache, slots)
        return old.sum(), key_cache.sum(), old

    with pytest.raises(AssertionError, match=r"a cache's 2048 elements: buf\d+ = empty_strided_cpu\(\(2048"):
        assert_no_cache_clone(step, TOKENS, *caches(), SLOTS)


def test_finds_a_computed_copy():
    def step(key, key_cache, value_cache, slots):
        scaled = key_cache * 2
        pagedkv_ops.write_kv(key, key, scaled, value_cache, slots)
        return scaled

    with pytest.raises(AssertionError, match="at least a cache's"):
        assert_no_cache_clone(step, TOKENS, *caches(), SLOTS)


def test_finds_a_copy_of_half_a_pool():
    """One layer's keys count as a cache, also where they are part of a stacked pool."""

    def step(key, pool, slots):
        pagedkv_ops.write_kv(key, key, pool[0], pool[1], slots)
        return pool[0] + 1

    with pytest.raises(AssertionError, match="at least a cache's"):
        assert_no_cache_clone(step, TOKENS, poison(2, 32, 4, 2, 8), SLOTS)


def test_finds_the_result_of_an_op_that_allocates_itself():
    """A gather of every block: Inductor allocates nothing, the op does."""

    def step(key, key_cache, value_cache, slots):
        write(key, key_cache, value_cache, slots)
        return pagedkv_ops.gather_kv(key_cache, torch.arange(32)[None], torch.tensor([0]), 128)

    with pytest.raises(AssertionError, match=r"at least a cache's 2048 elements: assert_size_stride\(buf\d+"):
        assert_no_cache_clone(step, TOKENS, *caches(), SLOTS)


def test_two_mutated_views_passed_as_arguments_are_seen_as_aliases():
    """Arguments keep their shared storage, so that Inductor's clone of aliased views is found."""
    pool = poison(2, 32, 4, 2, 8)
    with pytest.raises(AssertionError, match="at least a cache's 2048 elements"):
        assert_no_cache_clone(write, TOKENS, pool[0], pool[1], SLOTS)


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
