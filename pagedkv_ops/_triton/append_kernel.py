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
def rows_of_writers(new, num_slots, slot, kv_head, key_rows, value_rows):
    """The pointers, those of written slots to the new tokens instead of the cache."""
    writer = writers(new.slots_ptr, num_slots, slot)
    token = writer.to(tl.int64)
    head = kv_head.to(tl.int64)
    new_key_rows = new.key_ptr + (token * new.key_stride_token + head * new.key_stride_head)
    new_value_rows = new.value_ptr + (token * new.value_stride_token + head * new.value_stride_head)
    return tl.where(writer >= 0, new_key_rows, key_rows), tl.where(writer >= 0, new_value_rows, value_rows)


@triton.jit
def store_new(
    new,  # New, see ``arguments``
    num_slots,
    cache,  # (this KV head's keys, strides of block and slot, its values, strides of block and slot)
    token,
    kv_head,
    num_blocks,
    SPEC: tl.constexpr,
):
    """The write itself, for one token and one KV head; a slot out of range or of a later token is skipped."""
    slot = tl.load(new.slots_ptr + token, mask=token < num_slots, other=-1).to(tl.int64)
    block = slot // SPEC.BLOCK_SIZE
    offset = slot % SPEC.BLOCK_SIZE
    last_writer = tl.max(writers(new.slots_ptr, num_slots, tl.full([1], 0, tl.int64) + slot), 0)
    if (slot >= 0) & (block < num_blocks) & (last_writer == token):
        row = token.to(tl.int64)
        head = kv_head.to(tl.int64)
        d_range = tl.arange(0, SPEC.BLOCK_D)
        dv_range = tl.arange(0, SPEC.BLOCK_DV)
        key_row = new.key_ptr + row * new.key_stride_token + head * new.key_stride_head
        value_row = new.value_ptr + row * new.value_stride_token + head * new.value_stride_head
        key = tl.load(key_row + d_range, mask=d_range < SPEC.D)
        value = tl.load(value_row + dv_range, mask=dv_range < SPEC.DV)
        tl.store(cache[0] + (block * cache[1] + offset * cache[2]) + d_range, key, mask=d_range < SPEC.D)
        tl.store(cache[3] + (block * cache[4] + offset * cache[5]) + dv_range, value, mask=dv_range < SPEC.DV)


@triton.jit
def first_written(
    slots_ptr,
    num_slots,
    table,  # (this sequence's row of the block table, stride of a column, number of blocks)
    lowest,
    stop,
    BLOCK_SIZE: tl.constexpr,
):
    """The first position from ``lowest`` to below ``stop`` whose slot this launch writes, else ``stop``."""
    first = stop
    columns = tl.cdiv(stop, BLOCK_SIZE)
    for start in range(lowest // BLOCK_SIZE, columns, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        block = tl.load(table[0] + column.to(tl.int64) * table[1], mask=column < columns, other=-1).to(tl.int64)
        block = tl.where(block < table[2], block, -1)
        for first_slot in range(0, num_slots, _SLOTS):
            i = first_slot + tl.arange(0, _SLOTS)
            slot = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64)
            position = column[:, None] * BLOCK_SIZE + (slot % BLOCK_SIZE).to(tl.int32)[None, :]
            written = (slot >= 0)[None, :] & (block[:, None] == (slot // BLOCK_SIZE)[None, :]) & (position >= lowest)
            first = tl.minimum(first, tl.min(tl.min(tl.where(written, position, stop), 1), 0))
    return first
