"""Prefix identity: what a hash covers, that it is the same everywhere, and what shares blocks with what."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys

import numpy as np
import pytest

from pagedkv.errors import InvalidArgumentError
from pagedkv.manager import GroupSpec, KVCacheManager
from pagedkv.manager.hashing import NO_KEYS, ChainHasher, KeySet, encode
from pagedkv.manager.tokens import TokenIds, pack_tokens
from tests.manager.actions import cache, compute, run

_HASHES = """
from pagedkv.manager import KVCacheManager
manager = KVCacheManager(20, 4, record_events=True)
keys = [("lora", "name@path"), ("image", b"digest", 2, 7), ("set", frozenset("abc")), ("map", {"x": 1.5, "y": None})]
manager.add(0, range(12), extra_keys=keys, cache_salt="tenant")
manager.allocate_slots(0)
manager.commit(0, 12)
print([event[1].hex() for event in manager.take_events()])
"""


def hashes_in_a_new_process(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", _HASHES], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_hashes_are_the_same_in_every_process():
    first = hashes_in_a_new_process("1")
    assert first.count("'") == 6
    assert first == hashes_in_a_new_process("2")


def test_hash_is_a_chain_of_sha256():
    manager = KVCacheManager(20, 4, record_events=True)
    compute(manager, 0, range(8))
    root = hashlib.sha256(b"pagedkv prefix 1" + struct.pack("<Q", 4)).digest()
    first = hashlib.sha256(root + struct.pack("<4q", 0, 1, 2, 3)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 4, 5, 6, 7)).digest()
    assert manager.take_events() == [
        ("stored", first, None, (0, 1, 2, 3)),
        ("stored", second, first, (4, 5, 6, 7)),
    ]
    assert manager.pool.cached_block(second) == 2


def test_encoding_tells_values_and_types_apart():
    values = [None, True, False, 0, 1, -1, 2**80, 1.0, -0.0, 0.0, "", "1", "a", b"", b"1", b"a", (), (1,), ((1,),)]
    values += [("a", "b"), ("ab",), ("a", ("b",)), {}, {"a": 1}, frozenset(), frozenset({"a"}), frozenset({("a", 1)})]
    assert len({encode(value) for value in values}) == len(values)
    assert encode([1, "a"]) == encode((1, "a"))
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})
    assert encode(np.int64(7)) == encode(7)
    with pytest.raises(InvalidArgumentError, match="got object"):
        encode(object())


SPELLINGS = [
    {},
    {"cache_salt": "x"},
    {"cache_salt": ""},
    {"cache_salt": b"x"},
    {"cache_salt": ("lora", "x")},
    {"extra_keys": [("lora", "x")]},
    {"extra_keys": [("image", "x")]},
    {"extra_keys": [("lora", b"x")]},
    {"extra_keys": [("lora", "x"), ("image", "y")]},
    {"extra_keys": [("lora", "x", 0, 4)]},
    {"extra_keys": [("lora", "x", 1, 4)]},
    {"extra_keys": [("lora", "x", 0, 3)]},
    {"extra_keys": [("lora", "x")], "cache_salt": "x"},
    {"extra_keys": [("salt", "x")]},
    {"extra_keys": [("Z", "x")]},
]


@pytest.mark.parametrize("hash_fn", ["sha256", lambda data: b"same"])
def test_keys_and_salts_are_never_confused(hash_fn):
    manager = KVCacheManager(200, 4, hash_fn=hash_fn)
    for number, spelling in enumerate(SPELLINGS):
        for other in SPELLINGS[number:]:
            assert manager.match_prefix(range(9), **other) == 0
        cache(manager, range(9), **spelling)
        assert manager.match_prefix(range(9), **spelling) == 8


def test_order_of_keys_does_not_matter():
    manager = KVCacheManager(20, 4)
    keys = [("lora", "x"), ("image", "y", 0, 9)]
    cache(manager, range(9), extra_keys=keys)
    assert manager.match_prefix(range(9), extra_keys=keys[::-1]) == 8
    assert manager.match_prefix(range(9), extra_keys=[*keys, keys[0]]) == 8


def test_a_range_concerns_the_blocks_it_overlaps():
    manager = KVCacheManager(40, 4)
    cache(manager, range(16), extra_keys=[("image", "cat", 5, 10)])
    for keys, hit in [
        ([("image", "cat", 5, 10)], 12),
        ([("image", "dog", 5, 10)], 4),  # up to the image
        ([("image", "cat", 6, 10)], 4),
        ([("image", "cat", 5, 9)], 8),
        ([], 4),
        ([("image", "cat", 5, 10), ("image", "dog", 13, 15)], 12),  # past what can be hit
        ([("image", "cat", 5, 10), ("image", "dog", 11, 15)], 8),
    ]:
        assert manager.match_prefix([*range(15), 15], extra_keys=keys) == hit, keys


def test_a_range_counts_from_its_own_start():
    """Two blocks inside one image are different parts of it."""
    keys = KeySet([("image", "cat", 0, 12)], None)
    assert keys.at(4, 8) != keys.at(8, 12)
    assert keys.at(12, 16) == ()


def test_partial_hits_stop_where_keys_differ():
    manager = KVCacheManager(40, 8, partial_hits=True)
    cache(manager, range(8), extra_keys=[("image", "cat", 5, 7)])
    assert manager.match_prefix(range(8), extra_keys=[("image", "cat", 5, 7)]) == 7
    assert manager.match_prefix(range(8), extra_keys=[("image", "dog", 5, 7)]) == 5
    assert manager.match_prefix(range(8), extra_keys=[("image", "cat", 3, 7)]) == 3
    assert manager.match_prefix(range(8)) == 5
    assert manager.match_prefix(range(8), extra_keys=[("lora", "x")]) == 0
    assert manager.match_prefix(range(8), cache_salt="x") == 0


def test_partial_hit_takes_the_longest():
    manager = KVCacheManager(40, 4, partial_hits=True)
    for tail in ([4, 5, 60, 61], [4, 5, 6, 70], [4, 80, 81, 82]):
        cache(manager, [0, 1, 2, 3, *tail])
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 99, 7, 8]) == 6
    assert manager.match_prefix([0, 1, 2, 3, 4, 99]) == 5
    assert manager.match_prefix([0, 1, 2, 3, 99, 5]) == 4
    assert manager.match_prefix([0, 1, 99]) == 2


def test_unknown_token_ids_are_never_hashed():
    manager = KVCacheManager(20, 4)
    compute(manager, "embeddings", 10)
    assert manager.pool.num_published == 0
    manager.append("embeddings", [1, 2, 3, 4, 5, 6])
    run(manager, "embeddings")
    assert manager.pool.num_published == 0
    assert manager.match_prefix(10) == 0


def test_known_tokens_before_unknown_ones_are_hashed():
    manager = KVCacheManager(20, 4)
    compute(manager, "a", range(5))
    manager.append("a", 6)
    run(manager, "a")
    assert manager.pool.num_published == 1
    manager.truncate("a", 5)
    manager.append("a", [5, 6, 7])
    run(manager, "a")
    assert manager.match_prefix(range(9)) == 8


@pytest.mark.parametrize("make", [list, tuple, lambda ids: np.array(ids), lambda ids: np.array(ids, np.int32), iter])
def test_token_ids_of_any_kind(make):
    manager = KVCacheManager(20, 4)
    cache(manager, list(range(9)))
    if make is iter:
        with pytest.raises(InvalidArgumentError, match="token_ids"):
            manager.match_prefix(make(range(9)))
    else:
        assert manager.match_prefix(make(list(range(9)))) == 8


@pytest.mark.parametrize("bad", ["abc", b"abc", [1.5], [None], ["1"], [2**63], -1, 1.5, None, [[1]]])
def test_token_ids_that_are_not_ints(bad):
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        pack_tokens(bad)


def test_each_block_is_hashed_once():
    calls = []

    def counted(data: bytes) -> bytes:
        calls.append(data)
        return hashlib.sha256(data).digest()

    manager = KVCacheManager(100, 4, hash_fn=counted, groups=[GroupSpec(), GroupSpec("sliding", 6), GroupSpec()])
    calls.clear()
    manager.add("a", range(41))
    for _ in range(3):
        run(manager, "a", 9)
    manager.preempt("a")
    run(manager, "a")
    manager.append("a", range(41, 50))
    for _ in range(9):
        run(manager, "a", 1)
    manager.fork("a", "b")
    manager.append("b", [7, 7, 7])
    run(manager, "b")
    assert len(calls) == 50 // 4 + 1  # the child's 13th block is another one


def test_long_prefixes_under_collisions_of_every_hash():
    """With a constant hash, prefixes are told apart by content alone."""
    manager = KVCacheManager(400, 2, hash_fn=lambda data: b"x")
    rng = random.Random(0)
    seen: list[list[int]] = []
    for _ in range(40):
        prompt = [rng.randrange(2) for _ in range(9)]
        longest = max((_common(prompt, other) // 2 * 2 for other in seen), default=0)
        assert manager.match_prefix(prompt) == min(longest, 8)
        cache(manager, prompt)
        seen.append(prompt[:8])


def _common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_chain_grows_from_any_point():
    hasher = ChainHasher("sha256", 4)
    tokens = TokenIds(pack_tokens(range(40)))
    whole = hasher.grow(None, 0, tokens, NO_KEYS, 10)
    part = hasher.grow(whole[3], 4, tokens, NO_KEYS, 10)
    assert [link.hash for link in part] == [link.hash for link in whole[4:]]


def test_block_published_without_its_content_is_no_hit():
    """Someone else's publish under one of our hashes cannot be checked against the tokens."""
    manager = KVCacheManager(20, 4, record_events=True)
    cache(manager, range(12))
    hashes = [event[1] for event in manager.take_events()]
    assert manager.reset_prefix_cache()
    for block, block_hash in zip(manager.pool.get_new_blocks(3), hashes, strict=True):
        manager.pool.publish(block, block_hash)
    assert manager.match_prefix(range(13)) == 0
    manager.pool.free_blocks([3, 2, 1])
    cache(manager, range(4))
    assert manager.match_prefix(range(13)) == 4
