"""Device functions that tell the rows of a batch apart and share out their keys; lengths are read on the device alone.

A batch of decode rows and chunks takes two launches, each of which leaves the other's sequences out. The keys of decode
rows are cut into shares of about equal size, of every sequence as many as its length needs: one program takes one share
of one sequence, whose number it finds from all lengths.
"""

import triton
import triton.language as tl

ALL_ROWS = tl.constexpr(0)
DECODE_ROWS = tl.constexpr(1)  # sequences with one query row
CHUNKS = tl.constexpr(2)  # the others


@triton.jit
def query_rows(cu_seqlens_ptr, b, mask, num_tokens):
    """First query row and number of rows of each sequence; what lies out of range is clamped."""
    first = tl.load(cu_seqlens_ptr + b, mask=mask, other=0)
    first = tl.where(b == 0, 0, tl.minimum(tl.maximum(first, 0), num_tokens)).to(tl.int32)
    stop = tl.load(cu_seqlens_ptr + b + 1, mask=mask, other=0)
    return first, tl.minimum(tl.maximum(stop, 0), num_tokens).to(tl.int32) - first


@triton.jit
def find_share(
    share,
    num_shares,  # at least two for each sequence
    seq_lens_ptr,
    cu_seqlens_ptr,
    batch,
    num_tokens,
    capacity,
    window_left,
    SPEC: tl.constexpr,
):
    """(sequence, which of its shares, number of its shares); that number is 0 for a program too many."""
    b = tl.arange(0, SPEC.SHARES)
    is_row = b < batch
    seq_len = tl.load(seq_lens_ptr + b, mask=is_row, other=0)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), capacity).to(tl.int32)
    if cu_seqlens_ptr is not None:
        is_row = tl.where(query_rows(cu_seqlens_ptr, b, is_row, num_tokens)[1] == 1, is_row, False)
    tiles = tl.cdiv(seq_len, SPEC.BLOCK_N)
    if SPEC.WINDOW_LEFT:
        tiles -= tl.maximum(seq_len - 1 - window_left, 0) // SPEC.BLOCK_N
    tiles = tl.where(is_row, tiles, 0)
    rows = is_row.to(tl.int32)
    num_rows = tl.sum(rows, 0)
    total = tl.sum(tiles.to(tl.int64), 0)
    smallest = tl.maximum(tl.cdiv(tl.max(tiles, 0), SPEC.MAX_SPLITS), SPEC.MIN_TILES)
    size = tl.maximum(tl.cdiv(total, num_shares).to(tl.int32), smallest)
    count = tl.maximum(tl.cdiv(tiles, size), rows)  # a row without keys has a result too
    # the last share of a row is not full; a while would cost the loop over keys its pipeline
    for half in tl.static_range(1, 3):
        larger = tl.maximum(tl.cdiv(total, num_shares - num_rows * half // 2).to(tl.int32), smallest)
        size = tl.where(tl.sum(count, 0) > num_shares, larger, size)
        count = tl.maximum(tl.cdiv(tiles, size), rows)
    stop = tl.cumsum(count, 0)
    mine = (share >= stop - count) & (share < stop)
    first = tl.sum(tl.where(mine, stop - count, 0), 0)
    return tl.sum(tl.where(mine, b, 0), 0), share - first, tl.sum(tl.where(mine, count, 0), 0)
