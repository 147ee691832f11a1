"""Device functions of the fused append: attention over a cache that the same launch writes.

Programs run in any order, so none may read a slot that the launch writes. One program per (token, KV head) stores the
token; every program takes the keys and values of written slots from the inputs, wherever the slots lie: in the middle
of a sequence, in a block of several sequences, or in no sequence at all.
"""

import triton
import triton.language as tl

_SLOTS = tl.constexpr(16)  # compared at a time with
_COLUMNS = tl.constexpr(32)  # of the block table


@triton.jit
def writers(slots_ptr, num_slots, slot):
    """The token that writes each slot, -1 for none; of several the last, as it is the one that ``store_new`` stores."""
    writer = tl.full(slot.shape, -1, tl.int32)
    for first_slot in range(0, num_slots, _SLOTS):
        i = first_slot + tl.arange(0, _SLOTS)
        written = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64)
        writer = tl.maximum(writer, tl.max(tl.where(slot[:, None] == written[None, :], i[None, :], -1), 1))
    return writer


@triton.jit
def store_new(
    new,  # see attention_kernel
    key_ptr,  # of this KV head in the cache
    value_ptr,
    cache_strides,  # (block, slot) of K, then of V
    token,
    kv_head,
    num_slots,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
):
    """The write itself, for one token and one KV head; a slot out of range or of a later token is skipped."""
    slot = tl.load(new[2] + token, mask=token < num_slots, other=-1).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    last_writer = tl.max(writers(new[2], num_slots, tl.full([1], 0, tl.int64) + slot), 0)
    if (slot >= 0) & (block < num_blocks) & (last_writer == token):
        row = token.to(tl.int64)
        d_range = tl.arange(0, triton.next_power_of_2(D))
        dv_range = tl.arange(0, triton.next_power_of_2(DV))
        key = tl.load(new[0] + row * new[3] + kv_head * new[4] + d_range, mask=d_range < D)
        value = tl.load(new[1] + row * new[5] + kv_head * new[6] + dv_range, mask=dv_range < DV)
        key_ptr += block * cache_strides[0] + offset * cache_strides[1]
        value_ptr += block * cache_strides[2] + offset * cache_strides[3]
        tl.store(key_ptr + d_range, key, mask=d_range < D)
        tl.store(value_ptr + dv_range, value, mask=dv_range < DV)


@triton.jit
def first_written(slots_ptr, num_slots, table, lowest, stop, num_blocks, BLOCK_SIZE: tl.constexpr):
    """The first position from ``lowest`` to below ``stop`` whose slot this launch writes, else ``stop``."""
    first = stop
    columns = tl.cdiv(stop, BLOCK_SIZE)
    for start in range(lowest // BLOCK_SIZE, columns, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        block = tl.load(table[0] + column * table[1], mask=column < columns, other=-1).to(tl.int64)
        block = tl.where(block < num_blocks, block, -1)
        for first_slot in range(0, num_slots, _SLOTS):
            i = first_slot + tl.arange(0, _SLOTS)
            slot = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64)
            position = column[:, None] * BLOCK_SIZE + (slot % BLOCK_SIZE).to(tl.int32)[None, :]
            written = (slot >= 0)[None, :] & (block[:, None] == (slot // BLOCK_SIZE)[None, :]) & (position >= lowest)
            first = tl.minimum(first, tl.min(tl.min(tl.where(written, position, stop), 1), 0))
    return first
