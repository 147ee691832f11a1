"""One step of attention: a tile of query rows meets a tile of keys. Online softmax in base 2 (arXiv:1805.02867)."""

import triton
import triton.language as tl

from .append_kernel import rows_of_writers
from .quantised import decode

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def convert(x, DTYPE: tl.constexpr):
    if x.dtype != DTYPE:
        x = x.to(tl.float32).to(DTYPE)
    return x


@triton.jit
def _operand(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Of a matrix product: no quantised number is rounded, nor scaled."""
    if FORMAT != "":
        x = decode(x, FORMAT)
    return convert(x, DTYPE)


@triton.jit
def _token_scales(scale, block, slot, readable):
    """[BLOCK_N]; 0 where nothing may be read."""
    return tl.load(scale[0] + (block * scale[1] + slot * scale[2]), readable, other=0.0)


@triton.jit
def _visible(key_position, position, in_range, windows, SPEC: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: the keys that each query row sees."""
    visible = in_range[None, :]
    if SPEC.CAUSAL:
        visible &= key_position[None, :] <= position[:, None]
    elif SPEC.WINDOW_RIGHT:
        visible &= key_position[None, :] <= position[:, None] + windows[1]
    if SPEC.WINDOW_LEFT:
        visible &= key_position[None, :] >= position[:, None] - windows[0]
    return visible


@triton.jit
def _capped(logits, softcap, SERIES: tl.constexpr):
    """softcap * tanh(logits) in base 2, as tanh(x) = 1 - 2 / (1 + exp(2 x)): saturates without NaN.

    Near 0 that loses 1e-7, which a large softcap multiplies: there four terms of the series are exact.
    """
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(logits * (2 * LOG2E)))
    if SERIES:
        square = logits * logits
        series = logits * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
        tanh = tl.where(square < 0.04, series, tanh)
    return softcap * tanh


@triton.jit
def _online_softmax(logits, highest_logit, denominator):
    """The tile's weights, the factor on what was summed before, and the new maximum and denominator."""
    new_highest = tl.maximum(highest_logit, tl.max(logits, 1))
    # rows that saw nothing yet: -inf - -inf would be NaN
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(logits - base[:, None])
    decay = tl.exp2(highest_logit - base)
    return weights, decay, new_highest, denominator * decay + tl.sum(weights, 1)


@triton.jit
def _rows(start, lowest, stop, cache, table, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """[BLOCK_N] each: the keys' blocks and slots, pointers to keys and to values, and whether they may be read.

    Block ids are loaded once per block where blocks and tiles are multiples of each other, else once per key.
    """
    SLOTS: tl.constexpr = SPEC.SLOTS
    COLUMNS: tl.constexpr = SPEC.BLOCK_N // SLOTS
    first = start + tl.arange(0, COLUMNS) * SLOTS  # of the keys that share a block id
    block = _load_blocks(first, lowest, stop, table, MASKED, SPEC)
    block = tl.reshape(tl.broadcast_to(block[:, None], [COLUMNS, SLOTS]), [SPEC.BLOCK_N])
    readable = (block >= 0) & (block < table[2])
    block = block.to(tl.int64)
    slot = ((start + tl.arange(0, SPEC.BLOCK_N)) % SPEC.BLOCK_SIZE).to(SPEC.OFFSETS)
    key_rows = block * cache[1] + slot * cache[2]
    value_rows = key_rows
    if not SPEC.SAME_STRIDES:
        value_rows = block * cache[4] + slot * cache[5]
    return block, slot, cache[0] + key_rows, cache[3] + value_rows, readable


@triton.jit
def _load_blocks(first, lowest, stop, table, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Ids of the blocks of the SLOTS keys from ``first`` on."""
    block_ptr = table[0] + (first // SPEC.BLOCK_SIZE).to(SPEC.OFFSETS) * table[1]
    if MASKED:
        block = tl.load(block_ptr, (first + (SPEC.SLOTS - 1) >= lowest) & (first < stop), other=-1)
    else:
        block = tl.load(block_ptr)
    return block


@triton.jit
def _load_boxes(cache, start, lowest, stop, table, COUNT: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """[COUNT * SLOTS, D]: keys or values from ``start`` on, by a descriptor; zeros where there is no block."""
    SLOTS: tl.constexpr = SPEC.SLOTS
    if COUNT == 1:
        start += tl.full([], 0, tl.int32)  # interpreted loops count in Python's integers
        block = _load_blocks(start, lowest, stop, table, MASKED, SPEC)
        block = tl.where((block >= 0) & (block < table[2]), block, -1).to(tl.int32)
        box = cache.load([block, start % SPEC.BLOCK_SIZE, 0])
        tile = tl.reshape(box, [SLOTS, box.shape[2]])
    else:
        HALF: tl.constexpr = COUNT // 2
        first = _load_boxes(cache, start, lowest, stop, table, HALF, MASKED, SPEC)
        second = _load_boxes(cache, start + HALF * SLOTS, lowest, stop, table, HALF, MASKED, SPEC)
        tile = tl.reshape(tl.permute(tl.join(first, second), [2, 0, 1]), [COUNT * SLOTS, first.shape[1]])
    return tile


@triton.jit
def attend_tile(
    start,  # position of the first key
    lowest,  # visible keys: the first, and their end
    stop,
    state,  # ([BLOCK_M, BLOCK_DV] sum, [BLOCK_M] highest logit, [BLOCK_M] denominator) of the tiles before
    rows,  # ([BLOCK_M, BLOCK_D] queries, [BLOCK_M] their positions, [BLOCK_M] their ALiBi slopes)
    cache,  # (this head's keys, strides of block and slot, its values, strides of block and slot), or two descriptors
    table,  # (this sequence's row of the block table, stride of a column, number of blocks)
    new,
    num_slots,
    kv_head,
    windows,
    scales,
    MASKED: tl.constexpr,  # some row may not see some key
    APPENDED: tl.constexpr,  # some key may be one that this launch writes
    SPEC: tl.constexpr,
):
    """The state with the tile's keys."""
    BOXES: tl.constexpr = SPEC.BLOCK_N // SPEC.SLOTS
    d_range = tl.arange(0, SPEC.BLOCK_D)
    dv_range = tl.arange(0, SPEC.BLOCK_DV)
    key_position = start + tl.arange(0, SPEC.BLOCK_N)
    in_range = (key_position >= lowest) & (key_position < stop)
    if SPEC.BOXED:
        key = tl.trans(_load_boxes(cache[0], start, lowest, stop, table, BOXES, MASKED, SPEC))
    else:
        block, slot, key_rows, value_rows, readable = _rows(start, lowest, stop, cache, table, MASKED, SPEC)
        if MASKED:
            readable &= in_range
        if APPENDED:  # never read what another program may be writing
            key_rows, value_rows = rows_of_writers(
                new, num_slots, block * SPEC.BLOCK_SIZE + slot, kv_head, key_rows, value_rows
            )
        key_mask = readable[None, :] & (d_range < SPEC.D)[:, None]
        key = tl.load(key_rows[None, :] + d_range[:, None], key_mask, other=0)
    key = _operand(key, SPEC.K_FORMAT, SPEC.COMPUTE)
    logits = tl.dot(rows[0], key, input_precision="tf32x3") * scales[0]
    if SPEC.K_TOKENS:
        logits *= _token_scales(scales[2], block, slot, readable)[None, :]
    if SPEC.SOFTCAP:
        logits = _capped(logits, scales[1], SPEC.SERIES)
    if SPEC.ALIBI:
        logits += rows[2][:, None] * (key_position[None, :] - rows[1][:, None]).to(tl.float32)
    if MASKED:
        logits = tl.where(_visible(key_position, rows[1], in_range, windows, SPEC), logits, float("-inf"))
    weights, decay, highest_logit, denominator = _online_softmax(logits, state[1], state[2])
    if SPEC.BOXED:
        value = _load_boxes(cache[1], start, lowest, stop, table, BOXES, MASKED, SPEC)
        if MASKED:  # a box also holds slots that nobody wrote
            value = tl.where(in_range[:, None], value, 0.0)
    else:
        value_mask = readable[:, None] & (dv_range < SPEC.DV)[None, :]
        value = tl.load(value_rows[:, None] + dv_range[None, :], value_mask, other=0)
    value = _operand(value, SPEC.V_FORMAT, SPEC.COMPUTE)
    acc = state[0] * decay[:, None]
    if SPEC.V_TOKENS:
        factors = _token_scales(scales[3], block, slot, readable)
        # in float16 small scales would leave the range of normal numbers
        if SPEC.COMPUTE == tl.float16:  # noqa: SIM300 (a field, not a constant)
            highest = tl.max(factors, 0)
            highest = tl.where((highest > 0.0) & (highest < float("inf")), highest, 1.0)
            weights = convert(weights * (factors / highest)[None, :], SPEC.COMPUTE)
            acc += tl.dot(weights, value, input_precision="tf32x3") * highest
        else:
            weights = convert(weights * factors[None, :], SPEC.COMPUTE)
            acc = tl.dot(weights, value, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(convert(weights, SPEC.COMPUTE), value, acc, input_precision="tf32x3")
    return acc, highest_logit, denominator
