"""Actions and the blocks they lead to: sharing, copies, swaps, windows, hits."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.manager import GroupSpec, KVCacheManager
from tests.manager.scripts import Script

PLAIN: dict[str, Any] = {"num_blocks": 10, "block_size": 4}
UNCACHED = {**PLAIN, "enable_prefix_caching": False, "num_host_blocks": 4}
SWAPPING = {**PLAIN, "num_host_blocks": 4}
PARTIAL = {**PLAIN, "partial_hits": True}
WINDOW = {"num_blocks": 40, "block_size": 2, "sliding_window": 4}
HYBRID = {"num_blocks": 20, "block_size": 4, "groups": [GroupSpec(), GroupSpec("sliding", 5)]}
SMALL = {"num_blocks": 4, "block_size": 4, "enable_prefix_caching": False}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    # hits
    "eviction inside a chain": (
        {"num_blocks": 4, "block_size": 2},
        "cache 1:7; add other #1; allocate other; hit 1:8 -> 4",
    ),
    "eviction of the head": ({"num_blocks": 4, "block_size": 2}, "compute a 1:7; evict 1; free a; hit 1:8 -> 0"),
    "resume after preemption": (
        PLAIN,
        "compute a 0:10; preempt a; allocate a; cached -> 8; a -> 1 2 3; slots -> 12 13",
    ),
    "whole prompt cached": (
        PLAIN,
        "cache 0:8; hit 0:8 -> 4; hit 0:9 -> 8; add a 0:8; allocate a; cached -> 4; a -> 1 3; copies -> ",
    ),
    "whole prompt cached, partial": (
        PARTIAL,
        "cache 0:8; hit 0:8 -> 7; hit 0:9 -> 8; add a 0:8; allocate a; cached -> 7; a -> 1 3; copies -> 2>3",
    ),
    "collision": (
        {**PLAIN, "hash_fn": lambda data: b"constant"},
        "cache 1:5,9; compute other 5:9,9; cached -> 0; compute repeat 1:5,9; cached -> 4",
    ),
    "chunk after a hit": (
        {"num_blocks": 40, "block_size": 16},
        "cache 0:300; add a 0:300; allocate a 256; cached -> 288; slots -> "
        + " ".join(map(str, range(19 * 16, 19 * 16 + 12))),
    ),
    "a cached middle hits again when its head is recomputed": (
        PLAIN,
        "compute a 0:12; free a; evict 1; hit 0:13 -> 0; cache 0:4; hit 0:13 -> 12",
    ),
    "equal blocks are all kept": (
        PLAIN,
        """add a 0:5; allocate a; add b 0:5; allocate b; commit a 5; commit b 5; a -> 1 2; b -> 3 4;
        published 1 3 -> 1 1; free a; evict 3; hit 0:5 -> 4; free b; compute c 0:5; cached -> 4; c -> 1 3;
        hit 0:5 -> 4""",
    ),
    "partial hits never spoil the cache": (
        PARTIAL,
        """cache 1:9; hit 1:7 -> 5; add b 1:7; allocate b; cached -> 5; b -> 1 3; slots -> 13; copies -> 2>3;
        commit b 1; compute c 1:10; cached -> 8; c -> 1 2 4""",
    ),
    "partial hit without a block for the copy": (
        {**PARTIAL, "num_blocks": 4},
        """cache 1:9; add last #1; allocate last; free? -> 2; add b 1:7; allocate b; cached -> 4; slots -> 8 9;
        copies -> ; commit b 2""",
    ),
    "partial hit without new tokens is copied later": (
        PARTIAL,
        """cache 0:8; add a 0:6; allocate a 0; cached -> 5; a -> 1 2; new -> ; slots -> ;
        run a; cached -> 0; a -> 1 3; new -> 3""",
    ),
    "partial hits are copied before every write": (
        PARTIAL,
        """cache 0:8; add a 0:6,50; allocate a; cached -> 6; add b 0:6,60; allocate b; cached -> 6; copies -> 2>3 2>4;
        commit a 1; commit b 1; hit 0:9 -> 8""",
    ),
    "hit on a pinned block": (
        PARTIAL,
        "cache 0:8; add a 0:6; allocate a; add b 0:9; allocate b; b -> 1 2 4; free b; free a; free? -> 9",
    ),
    "allocation never hands out its own hits": (
        {"num_blocks": 5, "block_size": 4},
        # 3 free of which 2 are the hits: two more blocks are not there
        "cache 0:8; compute x 50; add a 0:13; allocate a; granted -> False; hit 0:13 -> 8; allocate a 4; a -> 1 2 4",
    ),
    # slots
    "accounting": (
        {"num_blocks": 11, "block_size": 16},
        """compute a 0:55; a -> 1 2 3 4; published 1 2 3 4 -> 1 1 1 0; compute b 0:48,100:105; cached -> 48; new -> 5;
        b -> 1 2 3 5; refs 1 2 3 5 -> 2 2 2 1; free? -> 5; append a 7,7,7,7; run a; new -> ; append a 200:219; run a;
        new -> 6; a -> 1 2 3 4 6; published 4 6 -> 1 0""",
    ),
    "no cache": (
        {"num_blocks": 5, "block_size": 4, "enable_prefix_caching": False},
        """compute a 0:10; a -> 1 2 3; free a; compute b 0:16; cached -> 0; b -> 1 2 3 4; append b 1:5; allocate b;
        granted -> False""",
    ),
    "external tokens": (
        {"num_blocks": 10, "block_size": 16},
        """add a 0:40; allocate a external=32; a -> 1 2 3; slots -> 48 49 50 51 52 53 54 55; hit 0:40 -> 0; commit a 32;
        hit 0:40 -> 32; published 1 2 3 -> 1 1 0; allocate a; slots -> 48 49 50 51 52 53 54 55; new -> """,
    ),
    "external tokens after a hit": (
        PLAIN,
        """cache 0:8; add a 0:20; allocate a 2 external=6; cached -> 8; a -> 1 2 3 4; slots -> 18 19; commit a 6;
        hit 0:20 -> 12; commit a 2; hit 0:20 -> 16""",
    ),
    "requests are cut and repeated calls take nothing": (
        PLAIN,
        """add a 0:6; allocate a 100; slots -> 4 5 6 7 8 9; new -> 1 2; allocate a 0; slots -> ; allocate a 100;
        slots -> 4 5 6 7 8 9; a -> 1 2; new -> ; free? -> 7""",
    ),
    "accepted drafts": (
        PLAIN,
        """compute a 0:6; append a 6; allocate a 1 ahead=3; slots -> 10; ahead -> 11 12 13; append a 7,8; commit a 3;
        hit 0:20 -> 8; truncate a 9; a -> 1 2 3""",
    ),
    "a sequence without tokens": (PLAIN, "add a #0; allocate a; slots -> ; append a #0; append a 0:5; run a; a -> 1 2"),
    "watermark": (
        {"num_blocks": 21, "block_size": 4, "watermark": 0.11, "enable_prefix_caching": False},
        # 4 free, 2 wanted, 3 kept; a sequence that runs may use what is kept, and so may one that is alone
        """compute a 0:64; add b 0:8; allocate b; granted -> False; allocate b 4; new -> 17; allocate b; new -> 18;
        free a; free b; compute c 0:80; granted -> True""",
    ),
    "watermark counts blocks in use, not hits": (
        {"num_blocks": 11, "block_size": 4, "watermark": 0.2},
        # 8 of its 9 blocks are hits, but free ones: 9 - 9 < 2
        "cache 0:32; compute a 100; add b 0:33; allocate b; granted -> False; free a; allocate b; cached -> 32",
    ),
    # sharing and copies
    "fork and parent both freed": (
        SMALL,
        """compute a 0:10; fork a b; free a; free? -> 0; free b; free? -> 3; free a -> UnknownSequenceError;
        free b -> UnknownSequenceError; compute c 0:12; c -> 1 2 3""",
    ),
    "divergence": (
        PLAIN,
        """compute a 0:6; fork a b; fork a c; append a 10; allocate a; append b 11; allocate b; append c 12; allocate c;
        a -> 1 3; b -> 1 4; c -> 1 2; copies -> 2>3 2>4; commit a 1; commit b 1; commit c 1; refs 1 2 3 4 -> 3 1 1 1""",
    ),
    "divergence at a block boundary": (
        PLAIN,
        """compute a 0:8; fork a b; fork a c; append a 10; allocate a; append b 11; allocate b; append c 12; allocate c;
        copies -> ; a -> 1 2 3; b -> 1 2 4; c -> 1 2 5""",
    ),
    "reorder": (
        PLAIN,
        """compute a 0:4; fork a b; fork a c; append a 10; run a; append b 11; run b; append c 12; run c; a -> 1 2;
        b -> 1 3; c -> 1 4; free? -> 5; reorder a b c by 2 0 0; a -> 1 4; b -> 1 2; c -> 1 2; free? -> 6;
        refs 3 -> 0""",
    ),
    "reorder is a permutation of the old state": (
        PLAIN,
        """compute a 0:3; compute b 10:15; compute c 20:27; reorder a b c by 2 1 0; a -> 4 5; b -> 2 3; c -> 1;
        reorder a b c by 0 0 0; a -> 4 5; b -> 4 5; c -> 4 5; refs 4 -> 3""",
    ),
    "chained copies": (
        UNCACHED,
        """compute a 0:2; fork a b; append b 10; allocate b; b -> 2; commit b 1 -> PendingCopyError; fork b c;
        append c 11; allocate c; copies -> 1>2 1>3""",
    ),
    "copy dropped with its owner": (
        UNCACHED,
        "compute a 0:2; fork a b; append b 10; allocate b; fork a c; append c 10; allocate c; free c; copies -> 1>2",
    ),
    "source stays alive until the copies are taken": (
        SMALL,
        # block 1 is pinned after its owner is gone: neither in a table nor free
        """compute a 0:2; fork a b; append b 1; allocate b; free a; free? -> 1; add c 0:8; allocate c; granted -> False;
        copies -> 1>2; free? -> 2; allocate c; new -> 1 3""",
    ),
    "copy that two owners wait for": (
        UNCACHED,
        "compute a 0:2; fork a b; append b 1; allocate b; fork b c; commit c 0; free b; copies -> 1>2",
    ),
    "cutting the destination drops its copy": (
        UNCACHED,
        "compute a 0:6; fork a b; append b 1; allocate b; truncate b 4; copies -> ",
    ),
    "sole owner writes into its own published block in place": (
        {**PLAIN, "record_events": True},
        """compute a 0:8; truncate a 6; hit 0:9 -> 8; append a 60,70; removed -> 0; allocate a; new -> ; a -> 1 2;
        removed -> 1; copies -> ; hit 0:9 -> 4; commit a 2; hit 0:6,60,70,8 -> 8""",
    ),
    "hit that is cut into is copied": (
        PLAIN,
        "cache 0:8; compute a 0:9; truncate a 6; append a 60; allocate a; copies -> 2>3; commit a 1; hit 0:9 -> 8",
    ),
    "shared published block is copied, then written in place": (
        PLAIN,
        """compute a 0:8; fork a b; truncate a 7; append a 70; truncate b 7; append b 80; run a; new -> 3; run b;
        new -> ; b -> 1 2; hit 0:7,70,1 -> 8; hit 0:7,80,1 -> 8""",
    ),
    "fork takes committed tokens only": (
        PLAIN,
        """compute a 0:5; append a 5,6; allocate a ahead=6; a -> 1 2 3 4; fork a b; b -> 1 2;
        commit b 1 -> CommitError""",
    ),
    "fork before anything is computed": (
        PLAIN,
        "cache 0:8; add a 0:9; fork a b; b -> ; append b 0:9; run b; cached -> 8",
    ),
    "append_step is single calls": (
        PLAIN,
        # forks that share a partial block, a block boundary and a plain sequence
        """compute a 0:6; fork a b; compute c 20:28; compute d 40:43; decode a b c d -> ((2 0) (2 1) (6 7)); a -> 1 7;
        b -> 1 2; c -> 3 4 6; d -> 5; copies -> 2>7; committed a b c d; published 5 -> 1; hit 40:43,10,1 -> 4""",
    ),
    "append_step without room changes nothing": (
        {"num_blocks": 4, "block_size": 4},
        "compute a 0:4; compute b 10:14; compute c 20:24; decode a b c -> None",
    ),
    "a fork at a block boundary publishes what it decodes": (
        PLAIN,
        """compute a 0:8; fork a b; decode b; committed b; decode b; committed b; decode b; committed b; decode b;
        committed b; b -> 1 2 3; hit 0:8,7,7,7,7,1 -> 12""",
    ),
    # swaps
    "swap that does not fit falls back": (
        {**PLAIN, "num_host_blocks": 2},
        "compute a 0:10; preempt a swap -> recompute; swaps -> |; allocate a; cached -> 8; slots -> 12 13",
    ),
    "preempting what holds nothing": (SWAPPING, "add a 0:5; preempt a swap -> recompute; run a; slots -> 4 5 6 7 8"),
    "swap out and in": (
        {**UNCACHED, "num_host_blocks": 3},
        """compute a 0:10; preempt a swap; free? -> 9; a -> ; swaps -> 1>0 2>1 3>2 |; host -> 3; append a 10;
        allocate a; cached -> 10; a -> 1 2 3; slots -> 14; commit a 1 -> PendingCopyError;
        swaps -> | 0>1 1>2 2>3; host -> 0; commit a 1""",
    ),
    "swapped blocks that are still cached are not moved": (
        SWAPPING,
        # only the block that was not full goes out, and comes back
        "compute a 0:10; preempt a swap; allocate a; a -> 1 2 3; swaps -> 3>2 | 2>3",
    ),
    "swap-out of a pending copy reads its source": (
        UNCACHED,
        "compute a 0:2; fork a b; append b 1; allocate b; preempt b swap; swaps -> 1>0 |; copies -> ",
    ),
    "copy from a pending swap-in becomes a swap-in": (
        UNCACHED,
        """compute a 0:2; preempt a swap; swaps -> 1>0 |; allocate a; fork a b; append b 1; allocate b; a -> 1; b -> 2;
        copies -> ; swaps -> | 0>1 0>2; host -> 0""",
    ),
    "swap-out of a pending swap-in keeps the host block": (
        {**UNCACHED, "num_host_blocks": 1},
        """compute a 0:2; preempt a swap; swaps -> 1>0 |; allocate a; preempt a swap; swaps -> |; allocate a;
        swaps -> | 0>1""",
    ),
    "swapped sequences are forked, cut and freed": (
        UNCACHED,
        # what nobody wants does not go out
        """compute a 0:10; preempt a swap; fork a b; truncate a 3; host -> 3; free b; host -> 1; preempt a swap;
        preempt a; host -> 0; swaps -> |""",
    ),
    "swapped-in blocks are published by the next commit": (
        SWAPPING,
        """compute a 0:9; preempt a swap; swaps -> 1>0 2>1 3>2 |; evict 1 2; append a 9; allocate a; hit 0:10 -> 0;
        commit a 1 -> PendingCopyError; swaps -> | 0>2 1>1 2>3; commit a 1; hit 0:10 -> 8""",
    ),
    # windows
    "prompt longer than the pool passes through a window": (
        {"num_blocks": 6, "block_size": 2, "sliding_window": 4},
        """add a 0:20; allocate a; granted -> False; run a 6; run a 6; run a 6; run a 6; append a 1; run a;
        a -> 0 0 0 0 0 0 0 0 2 4 1; free a; free? -> 5""",
    ),
    "None releases nothing": (
        {"num_blocks": 6, "block_size": 2, "sliding_window": 4},
        "compute a 0:7; append a 1:9; allocate a; granted -> False; a -> 1 2 3 4; allocate a 3; a -> 0 0 3 4 5",
    ),
    "released blocks serve the same call": (
        {"num_blocks": 5, "block_size": 2, "sliding_window": 3},
        "compute a 0:8; free? -> 0; append a 0:6; run a; new -> 3 2 1",
    ),
    "drafts never move the window": (
        WINDOW,
        """compute a 0:6; allocate a ahead=8; a -> 0 2 3 4 5 6 7; truncate a 6; a -> 0 2 3; allocate a 0; a -> 0 2 3""",
    ),
    "truncating into released positions": (
        WINDOW,
        """compute a 0:20; append a 1; run a; a -> 0 0 0 0 0 0 0 0 9 10 11; truncate a 18 -> ReleasedPositionError;
        truncate a 10 -> ReleasedPositionError; truncate a 1 -> ReleasedPositionError; truncate a 19;
        truncate a 0; a -> ; append a 0:5; run a; free a; free? -> 39""",
    ),
    "truncating a swapped window": (
        {**WINDOW, "num_host_blocks": 20},
        """compute a 0:20; append a 1; run a; preempt a swap; truncate a 18 -> ReleasedPositionError; truncate a 19;
        allocate a; cached -> 19""",
    ),
    "window of one needs the last block as a proof": (
        {**WINDOW, "sliding_window": 1},
        "hit 0:9 -> 0; cache 0:4; hit 0:9 -> 4",
    ),
    "window longer than everything is full attention": (
        {**WINDOW, "sliding_window": 1000},
        "cache 0:8; hit 0:9 -> 8; compute a 0:9; a -> 1 2 3 4 5",
    ),
    "groups are allocated one after another": (
        HYBRID,
        """compute a 0:12; a -> (1 2 3) (4 5 6); new -> (1 2 3) (4 5 6); append a 1; run a; a -> (1 2 3 7) (0 0 6 8);
        slots -> (28) (32)""",
    ),
    "tails of all groups are evicted first": (
        {"num_blocks": 13, "block_size": 4, "groups": [GroupSpec(), GroupSpec("sliding", 100)]},
        "cache 0:24; add other #1; allocate other; hit 0:25 -> 20",
    ),
    "partial hits of groups": (
        {**HYBRID, "partial_hits": True},
        "compute a 0:12; free a; add b 0:10,50,51; allocate b; cached -> 10; copies -> 3>7 6>8; b -> (1 2 7) (0 5 8)",
    ),
    "chunked hits need the current chunk only": (
        {"num_blocks": 40, "block_size": 2, "groups": [GroupSpec("chunked", 6)]},
        """add a 0:10; run a 2; run a 2; run a 2; run a 2; run a 2; free a; hit 0:11 -> 10; evict 1 2 3; hit 0:11 -> 10;
        evict 4; hit 0:11 -> 0""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    settings, script = CASES[case]
    Script(KVCacheManager(**settings)).play(script)


def test_watermark_is_a_fraction_rounded_up():
    for num_blocks, watermark, kept in ((21, 0.11, 3), (101, 0.07, 7)):  # 0.07 * 100 is 7.000000000000001
        assert KVCacheManager(num_blocks, 4, watermark=watermark).state.watermark_blocks == kept
