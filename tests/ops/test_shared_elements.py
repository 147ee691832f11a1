"""K and V may be views of one storage as long as no element belongs to both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference

WRITES = pytest.mark.parametrize("write", [pagedkv_ops.write_kv, reference.write_kv], ids=["op", "reference"])


def addresses(view: torch.Tensor) -> set[int]:
    """Storage offsets of every element."""
    storage = torch.arange(view.untyped_storage().nbytes() // 4)
    return set(storage.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist())


def is_refused(write, key_cache, value_cache) -> bool:
    def empty(cache):
        return torch.zeros(0, cache.size(2), cache.size(3))

    try:
        write(empty(key_cache), empty(value_cache), key_cache, value_cache, torch.zeros(0, dtype=torch.int64))
    except RuntimeError as error:
        return str(error).splitlines()[0] == "write_kv: key_cache and value_cache must not share elements"
    return False


@st.composite
def two_views(draw):
    """Two equally shaped slices of one pool, and how its dimensions are ordered in memory."""
    sizes = [draw(st.integers(2, 5)) for _ in range(4)]
    order = draw(st.permutations([0, 1, 2]))
    memory = torch.zeros([sizes[dim] for dim in order] + [sizes[3]])
    pool = memory.permute([order.index(dim) for dim in range(3)] + [3])
    views = [pool, pool]
    for dim, size in enumerate(sizes):
        length = draw(st.integers(1, size))
        for i in range(2):
            start = draw(st.integers(0, size - length))
            views[i] = views[i].narrow(dim, start, length)
    return views


@WRITES
@given(two_views())
def test_equal_shapes(write, views):
    key_cache, value_cache = views
    assert is_refused(write, key_cache, value_cache) == bool(addresses(key_cache) & addresses(value_cache))


@WRITES
def test_parts_of_a_pool(write):
    pool = torch.zeros(3, 4, 2, 7)
    head, tail, most, last = pool[..., :4], pool[..., 4:], pool[..., 3:], pool[..., 6:]
    for key_cache, value_cache, refused in (
        (head, tail, False),
        (most, pool[..., :3], False),
        (head, most, True),
        (pool, last, True),
        (pool, pool, True),
        (pool, torch.zeros_like(pool), False),
        (pool[:0], pool[:0], False),
    ):
        assert is_refused(write, key_cache, value_cache) == refused
