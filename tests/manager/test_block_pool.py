"""The pool alone, as people with a manager of their own use it."""

from __future__ import annotations

import copy
import pickle
import random
from array import array

import pytest

from pagedkv.block_pool import BlockPool


def test_fresh_pool_counts_up():
    pool = BlockPool(6)
    assert pool.num_usable == pool.num_free == 5
    assert pool.get_new_blocks(2) == [1, 2]
    assert pool.get_new_blocks(0) == []
    assert pool.get_new_blocks(3) == [3, 4, 5]
    pool.check_integrity()


@pytest.mark.parametrize("count", [3, 40])  # below and above the size from which tables are given back in bulk
def test_order_of_reuse(count):
    """Without a hash last freed, first reused; with one least recently used first, tails before heads."""
    pool = BlockPool(4 * count + 1)
    groups = [pool.get_new_blocks(count) for _ in range(4)]
    for number in (1, 3):
        for block in groups[number]:
            pool.publish(block, b"%d" % block)
    for group in groups:
        pool.free_blocks(group[::-1])
    pool.check_integrity()
    expected = [*groups[2], *groups[0], *groups[1][::-1], *groups[3][::-1]]
    assert pool.free_ids() == expected
    assert pool.get_new_blocks(4 * count) == expected


def test_eviction_is_lazy():
    pool = BlockPool(3, record_events=True)
    (block, other) = pool.get_new_blocks(2)
    pool.publish(block, b"h", parent=b"p", tokens=[1, 2])
    pool.free_blocks([other, block])
    assert pool.cached_block(b"h") == block
    pool.touch([block])
    assert pool.num_free == 1
    pool.free_blocks([block])
    assert pool.num_evictions == 0
    assert pool.get_new_blocks(2) == [other, block]
    assert pool.cached_block(b"h") is None
    assert pool.num_evictions == 1
    assert pool.take_events() == [("stored", b"h", b"p", (1, 2)), ("removed", b"h")]


def test_events_follow_the_hash_not_the_block():
    pool = BlockPool(4, record_events=True)
    blocks = pool.get_new_blocks(2)
    for block in blocks:
        pool.publish(block, b"h")
        pool.publish(block, b"h")  # a repetition changes nothing
    pool.evict(blocks[:1])
    assert pool.cached_block(b"h") == blocks[1]
    pool.evict(blocks)
    assert [event[0] for event in pool.take_events()] == ["stored", "removed"]


def test_block_in_use_is_hit_first():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.publish(block, b"h")
    pool.free_blocks(blocks[:2])
    assert pool.cached_block(b"h") == blocks[2]
    pool.free_blocks(blocks[2:])
    assert pool.cached_block(b"h") == blocks[0]
    assert pool.cached_block(b"other") is None


def test_evicted_free_block_is_reused_first():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    for block in blocks:
        pool.publish(block, b"%d" % block)
    pool.free_blocks(blocks)
    pool.evict([3])
    pool.check_integrity()
    assert pool.get_new_blocks(2) == [3, 1]


@pytest.mark.parametrize("count", [3, 40])
def test_freed_twins_are_reused_first(count):
    """Of equal blocks the back of the queue keeps one, as just used; the copies in front of it keep their hashes."""
    pool = BlockPool(4 * count + 1)
    first, other, second, third = (pool.get_new_blocks(count) for _ in range(4))
    for blocks in (first, second, third):
        for block, name in zip(blocks, range(count), strict=True):
            pool.publish(block, b"%d" % name)
    for block in other:
        pool.publish(block, b"other %d" % block)
    for blocks in (first, other, second):
        pool.free_blocks(blocks[::-1])
    assert pool.free_ids() == [*second, *first, *other[::-1]]  # the third is still in use
    pool.free_blocks(third[::-1])
    assert pool.free_ids() == [*third, *second, *other[::-1], *first[::-1]]
    pool.touch([*first, *other])
    pool.free_blocks([*first[::-1], *other[::-1]])
    assert pool.free_ids() == [*third, *second, *first[::-1], *other[::-1]]
    pool.check_integrity()
    pool.evict([*first, *third])  # another stays
    assert pool.free_ids() == [*third[::-1], *first[::-1], *other[::-1], *second]
    pool.check_integrity()
    pool.touch([*second, *first])
    assert pool.get_new_blocks(2 * count) == [*third[::-1], *other[::-1]]
    pool.free_blocks(second[::-1])
    assert pool.free_ids() == second[::-1]


def test_the_last_twin_in_use_forgets_its_hash():
    pool = BlockPool(4)
    first, second, other = pool.get_new_blocks(3)
    for block, name in ((first, b"h"), (second, b"h"), (other, b"other")):
        pool.publish(block, name)
    pool.free_blocks([other, first])
    assert pool.free_ids() == [first, other]
    pool.evict([second])
    assert pool.free_ids() == [other, first]  # nobody else holds it now
    pool.check_integrity()


def test_tables_given_back_in_bulk():
    """As block by block, from the last one on: twins that are free, in use or in the table, shared and plain blocks."""
    rng = random.Random(0)
    pool = BlockPool(400)
    for _ in range(100):
        tables, names = [], rng.sample(range(60), 40)
        for _ in range(rng.randint(1, 4)):
            table = pool.get_new_blocks(rng.randint(12, 40))
            for block, name in zip(table, names, strict=False):
                if rng.random() < 0.8:
                    pool.publish(block, b"%d" % name)
            cached = {pool.cached_block(b"%d" % name) for name in range(60) if name not in names} - {None}
            hits = rng.sample(sorted(cached), rng.randint(0, min(16, len(cached))))
            pool.acquire(array("q", hits))
            tables.append([*hits, *table])
        for table in rng.sample(tables, len(tables)):
            single = copy.deepcopy(pool)
            for block in reversed(table):
                single.release_one(block)
            pool.release(array("q", table))
            pool.check_integrity()
            assert pool.free_ids() == single.free_ids()
            assert (pool.refs, pool.flags) == (single.refs, single.flags)


def test_equal_hashes_of_other_contents_are_no_twins():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for block, content in zip(blocks, ("a", "b", "a"), strict=True):
        pool.publish(block, b"h", content)
    pool.free_blocks([1])
    pool.free_blocks([2])
    pool.free_blocks([3])
    assert pool.free_ids() == [3, 2, 1]
    pool.check_integrity()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_copies_are_independent(duplicate):
    pool = BlockPool(40)
    blocks = pool.get_new_blocks(20)
    pool.publish(1, b"h", "content")
    twin = duplicate(pool)
    pool.free_blocks(blocks[::-1])
    assert twin.num_free == 19
    twin.free_blocks(blocks[::-1])  # in bulk, through the views of its own arrays
    twin.check_integrity()
    assert twin.free_ids() == pool.free_ids()
    assert twin.contents[twin.cached_block(b"h")] == "content"


def test_pins():
    pool = BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    pool.pin(block)
    pool.pin(block)
    pool.free_blocks([block])
    assert pool.num_free == 3
    pool.check_integrity()
    pool.unpin(block)
    assert block not in pool.free_ids()
    pool.unpin(block)
    assert pool.free_ids()[0] == block
    pool.pin(2)  # a free one
    assert 2 not in pool.free_ids()
    pool.touch([2])
    pool.unpin(2)
    pool.check_integrity()
    assert pool.refs[2] == 1
    assert pool.reset() is False


def test_against_a_plain_list():
    """Random use of the public methods against a queue kept as a list."""
    rng = random.Random(0)
    pool = BlockPool(40)
    queue, refs, hashes = list(range(1, 40)), [0] * 40, {}
    for step in range(4000):
        action = rng.randrange(5)
        used = [block for block in range(1, 40) if refs[block]]
        if action == 0:
            count = rng.randint(0, min(6, len(queue)))
            expected, queue = queue[:count], queue[count:]
            assert pool.get_new_blocks(count) == expected
            for block in expected:
                refs[block] = 1
                hashes.pop(block, None)
        elif action == 1 and used:
            block = rng.choice(used)
            if block not in hashes:
                hashes[block] = b"%d" % step
                pool.publish(block, hashes[block])
        elif action == 2:
            some = rng.sample(range(1, 40), rng.randint(1, 5))
            pool.touch(some)
            for block in some:
                if refs[block] == 0:
                    queue.remove(block)
                refs[block] += 1
        elif action == 3 and used:
            some = rng.sample(used, rng.randint(1, len(used)))
            pool.free_blocks(some)
            for block in some:
                refs[block] -= 1
                if refs[block] == 0:
                    queue.insert(len(queue) if block in hashes else 0, block)
        elif action == 4:
            some = rng.sample(range(1, 40), 3)
            pool.evict(some)
            for block in some:
                if hashes.pop(block, None) is not None and refs[block] == 0:
                    queue.remove(block)
                    queue.insert(0, block)
        assert list(pool.refs) == refs
        assert pool.free_ids() == queue
        assert pool.index.hashes == [hashes.get(block) for block in range(40)]
        pool.check_integrity()
