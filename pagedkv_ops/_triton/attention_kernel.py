"""The attention kernel, over (query tile, KV head, split of the keys); ``splits`` joins what the splits leave.

A tile packs ``TILE_HEADS`` query heads of one KV head and ``BLOCK_M // TILE_HEADS`` tokens of one sequence into its M
rows, so that decode (one token) and prefill are the same kernel and every key is loaded once per group of heads.
Lengths, boundaries and block ids are read on the device alone: grids and arguments depend on shapes and strides.
Online softmax in base 2 (arXiv:1805.02867); splits as in Flash-Decoding.
"""

import triton
import triton.language as tl

from .append_kernel import first_written, store_new, writers

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _convert(x, DTYPE: tl.constexpr):
    if x.dtype != DTYPE:
        x = x.to(tl.float32).to(DTYPE)
    return x


@triton.jit
def _find_sequence(cu_seqlens_ptr, batch, num_tokens, tile, TILE_TOKENS: tl.constexpr):
    """The sequence of a tile, its tile number there and its rows; the rows past the last sequence count as one more.

    Sequence i owns the tiles from cu[i] // TILE_TOKENS + i on: at least as many as it needs, found by binary search.
    """
    low = tl.full([], 0, tl.int32)
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        first_row = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + middle), 0), num_tokens)
        if first_row // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    first_row = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + low), 0), num_tokens).to(tl.int32)
    first_row = tl.where(low == 0, 0, first_row)
    stop_row = tl.load(cu_seqlens_ptr + low + 1, mask=low < batch, other=num_tokens)
    stop_row = tl.minimum(tl.maximum(stop_row, 0), num_tokens).to(tl.int32)
    return low, tile - (first_row // TILE_TOKENS + low), first_row, stop_row - first_row


@triton.jit
def _key_range(
    first_position,  # of the tile's first query row, and of its last
    last_position,
    seq_len,
    split,
    num_splits,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys from ``lowest`` to below ``stop``, in tiles from ``begin`` on; every row sees those below ``full_stop``."""
    begin = 0
    stop = seq_len
    full_stop = seq_len
    if CAUSAL:
        stop = tl.minimum(stop, last_position + 1)
        full_stop = tl.minimum(full_stop, first_position + 1)
    elif WINDOW_RIGHT:
        stop = tl.minimum(stop, last_position + window_right + 1)
        full_stop = tl.minimum(full_stop, first_position + window_right + 1)
    if WINDOW_LEFT:
        begin = tl.maximum(first_position - window_left, 0)
    lowest = begin
    begin = begin // BLOCK_N * BLOCK_N  # tiles start at multiples of BLOCK_N whatever the query rows are
    if SPLIT:  # the visible tiles of this sequence, not those of the table's width, are shared out
        tiles_per_split = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N), num_splits)
        begin += split * tiles_per_split * BLOCK_N
        stop = tl.minimum(stop, begin + tiles_per_split * BLOCK_N)
    full_stop = tl.minimum(tl.maximum(full_stop // BLOCK_N * BLOCK_N, begin), stop)
    return lowest, begin, full_stop, stop


@triton.jit
def _visible(
    key_position,  # [BLOCK_N]
    position,  # [BLOCK_M] of the queries
    in_range,  # [BLOCK_N]
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
):
    visible = in_range[None, :]
    if CAUSAL:
        visible &= key_position[None, :] <= position[:, None]
    elif WINDOW_RIGHT:
        visible &= key_position[None, :] <= position[:, None] + window_right
    if WINDOW_LEFT:
        visible &= key_position[None, :] >= position[:, None] - window_left
    return visible


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
def _capped(logits, softcap):
    """softcap * tanh(logits) in base 2, as tanh(x) = 1 - 2 / (1 + exp(2 x)): saturates without NaN."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(logits * (2 * LOG2E))))


@triton.jit
def _store_rows(
    out_ptr,
    lse_ptr,
    out_row,  # [BLOCK_M]
    row_mask,
    acc,  # [BLOCK_M, BLOCK_DV]
    highest_logit,
    denominator,
    SPLIT: tl.constexpr,
    STORE_LSE: tl.constexpr,
    DV: tl.constexpr,
):
    seen = denominator != 0.0  # true for NaN
    denominator = tl.where(seen, denominator, 1.0)
    acc = tl.where(seen[:, None], acc / denominator[:, None], 0.0)
    dv_range = tl.arange(0, acc.shape[1])
    out_mask = row_mask[:, None] & (dv_range < DV)[None, :]
    if SPLIT:  # what an empty split left unwritten is never read
        out_mask &= seen[:, None]
    tl.store(out_ptr + out_row[:, None] * DV + dv_range[None, :], acc.to(out_ptr.dtype.element_ty), out_mask)
    if STORE_LSE:
        lse = tl.where(seen, (highest_logit + tl.log2(denominator)) * LN2, float("-inf"))
        tl.store(lse_ptr + out_row, lse, row_mask)


@triton.jit(
    do_not_specialize=[
        "table_stride_row",
        "num_tokens",
        "batch",
        "num_blocks",
        "capacity",
        "num_splits",
        "num_slots",
        "window_left",
        "window_right",
    ]
)
def attention_kernel(
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [N, S, Hkv, D]
    value_ptr,  # [N, S, Hkv, Dv]
    table_ptr,  # [B, W]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B+1]
    alibi_ptr,  # [Hq]
    sinks_ptr,  # [Hq]
    new,  # (key [T, Hkv, D], value, slot_mapping, strides of token and head of key, then of value) when APPEND
    out_ptr,  # [T, Hq, num_splits, Dv], contiguous; float32 when SPLIT
    lse_ptr,  # [T, Hq, num_splits]
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    table_stride_row,
    table_stride_column,
    num_tokens,
    batch,
    num_blocks,
    capacity,  # W * S
    num_splits,
    num_slots,
    window_left,
    window_right,
    scale,  # times log2(e), or divided by the softcap
    softcap,  # times log2(e)
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,  # cu_seqlens_q given
    APPEND: tl.constexpr,  # write the new tokens too; not when PACKED
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ONE_LOOP: tl.constexpr,  # same instructions for every key tile: bits do not depend on how rows are cut into tiles
    COMPUTE: tl.constexpr,  # operand type of the matrix products
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # a large float32 query does not fit in registers beside the rest: its rows are read from shared memory per tile
    RELOAD: tl.constexpr = COMPUTE.primitive_bitwidth == 32 and BLOCK_D >= 128 and BLOCK_M * BLOCK_D >= 4096
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    # the last tiles of a causal prompt see the most keys: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    if PACKED:
        b, tile, first_row, query_len = _find_sequence(cu_seqlens_ptr, batch, num_tokens, tile, TILE_TOKENS)
    else:
        b, tile, first_row, query_len = tile, 0, tile, 1
    first_token = tile * TILE_TOKENS
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + b, mask=b < batch, other=0)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), capacity).to(tl.int32)

    m_range = tl.arange(0, BLOCK_M)
    token = first_token + m_range // TILE_HEADS
    group_head = (tl.program_id(1) % HEAD_TILES) * TILE_HEADS + m_range % TILE_HEADS
    row_mask = (m_range < TILE_HEADS * TILE_TOKENS) & (token < query_len) & (group_head < GROUP)
    row = (first_row + token).to(tl.int64)
    head = kv_head * GROUP + group_head
    position = seq_len - query_len + token  # of the query in its sequence
    d_range = tl.arange(0, BLOCK_D)
    dv_range = tl.arange(0, BLOCK_DV)
    d_mask = d_range < D
    dv_mask = dv_range < DV
    query_offsets = row * query_stride_token + head * query_stride_head
    query_mask = row_mask[:, None] & d_mask[None, :]
    query = tl.load(query_ptr + query_offsets[:, None] + d_range[None, :], query_mask, other=0.0)
    query = _convert(query, COMPUTE)

    lowest, begin, full_stop, stop = _key_range(
        seq_len - query_len + first_token,
        seq_len - query_len + tl.minimum(first_token + TILE_TOKENS, query_len) - 1,
        seq_len,
        split,
        num_splits,
        window_left,
        window_right,
        CAUSAL,
        WINDOW_LEFT,
        WINDOW_RIGHT,
        SPLIT,
        BLOCK_N,
    )
    highest_logit = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink_mask = row_mask & (split == 0) & (b < batch)
        highest_logit = tl.load(sinks_ptr + head, sink_mask, other=float("-inf")).to(tl.float32) * LOG2E
        denominator = tl.where(highest_logit == float("-inf"), 0.0, 1.0)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    n_range = tl.arange(0, BLOCK_N)
    key_ptr += kv_head * key_stride_head
    value_ptr += kv_head * value_stride_head
    table_ptr += b.to(tl.int64) * table_stride_row

    written = stop
    if APPEND:
        if (split == 0) & (tl.program_id(1) % HEAD_TILES == 0):
            strides = (key_stride_block, key_stride_slot, value_stride_block, value_stride_slot)
            store_new(new, key_ptr, value_ptr, strides, b, kv_head, num_slots, num_blocks, BLOCK_SIZE, D, DV)
        table = (table_ptr, table_stride_column)
        written = first_written(new[2], num_slots, table, tl.maximum(begin, lowest), stop, num_blocks, BLOCK_SIZE)
        written = tl.maximum(written // BLOCK_N * BLOCK_N, begin)

    # two copies of the loop: tiles that every row sees whole need no mask, those without new tokens none of these
    MASK_ALL: tl.constexpr = ONE_LOOP or WINDOW_LEFT or RELOAD
    middle = tl.minimum(written, stop if MASK_ALL else full_stop)
    for LAST in tl.static_range(1 if MASK_ALL and not APPEND else 0, 2):
        loop_begin = middle if LAST and (APPEND or not MASK_ALL) else begin
        loop_stop = stop if LAST else middle
        for start in tl.range(loop_begin, loop_stop, BLOCK_N, disable_licm=RELOAD):
            key_position = start + n_range
            block_ptr = table_ptr + key_position // BLOCK_SIZE * table_stride_column
            if LAST or MASK_ALL:
                in_range = (key_position >= lowest) & (key_position < stop)
                block = tl.load(block_ptr, in_range, other=-1)
            else:
                block = tl.load(block_ptr)
            readable = (block >= 0) & (block < num_blocks)
            block = block.to(tl.int64)
            slot = key_position % BLOCK_SIZE
            key_rows = key_ptr + (block * key_stride_block + slot * key_stride_slot)
            value_rows = value_ptr + (block * value_stride_block + slot * value_stride_slot)
            if APPEND and LAST:  # never read what another program may be writing
                writer = writers(new[2], num_slots, block * BLOCK_SIZE + slot).to(tl.int64)
                key_rows = tl.where(writer >= 0, new[0] + (writer * new[3] + kv_head * new[4]), key_rows)
                value_rows = tl.where(writer >= 0, new[1] + (writer * new[5] + kv_head * new[6]), value_rows)
            key = tl.load(key_rows[None, :] + d_range[:, None], readable[None, :] & d_mask[:, None], other=0.0)
            key = _convert(key, COMPUTE)
            logits = tl.dot(query, key, input_precision="tf32x3") * scale
            if SOFTCAP:
                logits = _capped(logits, softcap)
            if ALIBI:
                logits += slope[:, None] * (key_position[None, :] - position[:, None]).to(tl.float32)
            if LAST or MASK_ALL:
                visible = _visible(
                    key_position, position, in_range, window_left, window_right, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT
                )
                logits = tl.where(visible, logits, float("-inf"))
            weights, decay, highest_logit, denominator = _online_softmax(logits, highest_logit, denominator)
            value = tl.load(value_rows[:, None] + dv_range[None, :], readable[:, None] & dv_mask[None, :], other=0.0)
            value = _convert(value, COMPUTE)
            acc = tl.dot(_convert(weights, COMPUTE), value, acc * decay[:, None], input_precision="tf32x3")

    out_row = (row * NUM_HEADS + head) * num_splits + split
    _store_rows(out_ptr, lse_ptr, out_row, row_mask, acc, highest_logit, denominator, SPLIT, STORE_LSE, DV)
