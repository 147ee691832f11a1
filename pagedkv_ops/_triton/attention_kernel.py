"""The attention kernel, over (query tile, KV head, split of the keys); ``splits`` joins what the splits leave.

A tile packs ``TILE_HEADS`` query heads of one KV head and ``BLOCK_M // TILE_HEADS`` tokens of one sequence into its M
rows, so that decode (one token) and prefill are the same kernel and every key is loaded once per group of heads.
Lengths, boundaries and block ids are read on the device alone: grids and arguments depend on shapes and strides.
Splits as in Flash-Decoding.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .append_kernel import first_written, store_new
from .attention_tile import LN2, LOG2E, attend_tile, convert
from .shares import CHUNKS, DECODE_ROWS, find_share, query_rows


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
    windows,
    SPEC: tl.constexpr,
):
    """Keys from ``lowest`` to below ``stop``, in tiles from ``begin`` on; every row sees those below ``full_stop``."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    begin = 0
    stop = seq_len
    full_stop = seq_len
    if SPEC.CAUSAL:
        stop = tl.minimum(stop, last_position + 1)
        full_stop = tl.minimum(full_stop, first_position + 1)
    elif SPEC.WINDOW_RIGHT:
        stop = tl.minimum(stop, last_position + windows[1] + 1)
        full_stop = tl.minimum(full_stop, first_position + windows[1] + 1)
    if SPEC.WINDOW_LEFT:
        begin = tl.maximum(first_position - windows[0], 0)
    lowest = begin
    begin = begin // BLOCK_N * BLOCK_N  # tiles start at multiples of BLOCK_N whatever the query rows are
    if SPEC.SPLIT:  # the visible tiles of this sequence, not those of the table's width, are shared out
        tiles_per_split = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N), num_splits)
        begin += split * tiles_per_split * BLOCK_N
        stop = tl.minimum(stop, begin + tiles_per_split * BLOCK_N)
    full_stop = tl.minimum(tl.maximum(full_stop // BLOCK_N * BLOCK_N, begin), stop)
    return lowest, begin, full_stop, stop


@triton.jit
def _load_rows(query, row, head, row_mask, position, alibi_ptr, SPEC: tl.constexpr):
    """(queries, positions, ALiBi slopes) of the tile's rows."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    d_range = tl.arange(0, SPEC.BLOCK_D)
    offsets = row * query.stride_token + head.to(tl.int64) * query.stride_head
    mask = row_mask[:, None] & (d_range < SPEC.D)[None, :]
    queries = convert(tl.load(query.ptr + offsets[:, None] + d_range[None, :], mask, other=0.0), SPEC.COMPUTE)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if SPEC.ALIBI:
        slope = tl.load(alibi_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
    return queries, position, slope


@triton.jit
def _first_state(sinks_ptr, head, sink_mask, SPEC: tl.constexpr):
    """(sum of values, highest logit, denominator) before the first key: a sink joins the denominator alone."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    highest_logit = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        highest_logit = tl.load(sinks_ptr + head, sink_mask, other=float("-inf")).to(tl.float32) * LOG2E
        denominator = tl.where(highest_logit == float("-inf"), 0.0, 1.0)
    return tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), highest_logit, denominator


@triton.jit
def _attend(state, key_range, rows, cache, table, new, num_slots, kv_head, windows, scales, SPEC: tl.constexpr):
    """The state after all keys of the range, see ``attend_tile``.

    Two copies of the loop: tiles that every row sees whole need no mask, those without new tokens none of these.
    """
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    RELOAD: tl.constexpr = SPEC.RELOAD
    APPEND: tl.constexpr = new is not None
    MASK_ALL: tl.constexpr = SPEC.ONE_LOOP or SPEC.WINDOW_LEFT or RELOAD
    acc, highest_logit, denominator = state
    lowest, begin, full_stop, stop = key_range
    written = stop
    if APPEND:
        written = first_written(new.slots_ptr, num_slots, table, tl.maximum(begin, lowest), stop, SPEC.BLOCK_SIZE)
        written = tl.maximum(written // BLOCK_N * BLOCK_N, begin)
    middle = tl.minimum(written, stop if MASK_ALL else full_stop)
    for LAST in tl.static_range(1 if MASK_ALL and not APPEND else 0, 2):
        loop_begin = middle if LAST and (APPEND or not MASK_ALL) else begin
        loop_stop = stop if LAST else middle
        for start in tl.range(loop_begin, loop_stop, BLOCK_N, disable_licm=RELOAD):
            acc, highest_logit, denominator = attend_tile(
                start,
                lowest,
                stop,
                (acc, highest_logit, denominator),
                rows,
                cache,
                table,
                new,
                num_slots,
                kv_head,
                windows,
                scales,
                LAST or MASK_ALL,
                APPEND and LAST,
                SPEC,
            )
    return acc, highest_logit, denominator


@triton.jit
def _store_rows(out_ptr, lse_ptr, out_row, row_mask, state, SPEC: tl.constexpr):
    acc, highest_logit, denominator = state
    seen = (denominator != 0.0) | (highest_logit == float("inf"))  # true for NaN
    denominator = tl.where(seen, denominator, 1.0)
    acc = tl.where(seen[:, None], acc / denominator[:, None], 0.0)
    dv_range = tl.arange(0, SPEC.BLOCK_DV)
    out_mask = row_mask[:, None] & (dv_range < SPEC.DV)[None, :]
    tl.store(out_ptr + out_row[:, None] * SPEC.DV + dv_range[None, :], acc.to(out_ptr.dtype.element_ty), out_mask)
    if lse_ptr is not None:
        lse = tl.where(seen, (highest_logit + tl.log2(denominator)) * LN2, float("-inf"))
        lse = tl.where(highest_logit == float("inf"), float("inf"), lse)  # not inf - inf
        tl.store(lse_ptr + out_row, lse, row_mask)


@triton.jit
def _of_head(cache, kv_head, num_blocks, D: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr):
    """(keys or values of one head, strides of block and slot), or a descriptor of boxes of slots that share a block."""
    ptr = cache.ptr + kv_head.to(tl.int64) * cache.stride_head
    if SPEC.BOXED:
        SLOTS: tl.constexpr = SPEC.SLOTS
        sizes = [num_blocks, SPEC.BLOCK_SIZE, D]
        boxes = tl.make_tensor_descriptor(ptr, sizes, [cache.stride_block, cache.stride_slot, 1], [1, SLOTS, BLOCK_D])
        result = (boxes,)
    else:
        result = (ptr, cache.stride_block, cache.stride_slot)
    return result


@triton.jit
def _scale_of_head(scale, kv_head, TOKENS: tl.constexpr):
    """((a head's scales, strides of block and slot) where tokens have their own, the scale where they have not)."""
    place = (0, 0, 0)
    factor = 1.0
    if scale is not None:
        ptr = scale.ptr + kv_head.to(tl.int64) * scale.stride_head
        if TOKENS:
            place = (ptr, scale.stride_block, scale.stride_slot)
        else:
            factor = tl.load(ptr)
    return place, factor


@triton.jit
def _place():
    """The last tiles of a causal prompt see the most keys: they are started first."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _load_length(seq_lens_ptr, b, batch, capacity, query_len, SPEC: tl.constexpr):
    """Of a sequence, clamped; 0 past the last one, and for a decode row beside chunks, whose splits stay empty."""
    seq_len = tl.load(seq_lens_ptr + b, mask=b < batch, other=0)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), capacity).to(tl.int32)
    if SPEC.ROWS == CHUNKS:
        seq_len = tl.where(query_len == 1, 0, seq_len)
    return seq_len


@triton.jit
def _out_row(row, head, split, num_splits, SPEC: tl.constexpr):
    if SPEC.SHARES:
        out_row = _place().to(tl.int64) * SPEC.NUM_HEADS + head
    else:
        out_row = (row * SPEC.NUM_HEADS + head) * num_splits + split
    return out_row


@triton.jit
def _find_work(
    seq_lens_ptr,
    cu_seqlens_ptr,
    shares_ptr,
    batch,
    num_tokens,
    capacity,
    num_splits,
    window_left,
    SPEC: tl.constexpr,
):
    """(sequence, tile of its query rows, its first row, their number, split of its keys, number of splits).

    The number of rows is 0 for a program without work.
    """
    place, split = _place(), tl.program_id(2)
    b, tile, first_row, query_len = place, 0, place, 1
    if SPEC.SHARES:
        b, split, num_splits = find_share(
            place, tl.num_programs(0), seq_lens_ptr, cu_seqlens_ptr, batch, num_tokens, capacity, window_left, SPEC
        )
        first_row, query_len = b, tl.minimum(num_splits, 1)
        if (query_len == 1) & (split == 0) & (tl.program_id(1) == 0):
            tl.store(shares_ptr + 2 * b, place)
            tl.store(shares_ptr + 2 * b + 1, num_splits)
    if SPEC.ROWS == DECODE_ROWS:
        first_row, num_rows = query_rows(cu_seqlens_ptr, b, True, num_tokens)
        query_len = tl.where(num_rows == 1, query_len, 0)
    elif cu_seqlens_ptr is not None:
        b, tile, first_row, query_len = _find_sequence(cu_seqlens_ptr, batch, num_tokens, place, SPEC.TILE_TOKENS)
        if SPEC.ROWS == CHUNKS and not SPEC.SPLIT:  # left to the other launch; rows past the last sequence are not
            query_len = tl.where((query_len == 1) & (b < batch), 0, query_len)
    return b, tile, first_row, query_len, split, num_splits


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
    query,  # Tokens [T, Hq, D]
    key,  # Cache [N, S, Hkv, D]
    value,  # Cache [N, S, Hkv, Dv]
    table,  # Table [B, W]
    table_stride_row,
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B+1], or None
    alibi_ptr,  # [Hq], or None
    sinks_ptr,  # [Hq], or None
    k_scale,  # Scale of a quantised cache, or None
    v_scale,
    new,  # New tokens to write, or None; not with cu_seqlens
    out_ptr,  # [T, Hq, num_splits, Dv], contiguous; float32 when SPLIT; with SHARES [number of shares, Hq, Dv]
    lse_ptr,  # [T, Hq, num_splits], or None; with SHARES [number of shares, Hq]
    shares_ptr,  # [B, 2], first share and number of shares of each sequence, or None
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
    SPEC: tl.constexpr,
):
    b, tile, first_row, query_len, split, num_splits = _find_work(
        seq_lens_ptr, cu_seqlens_ptr, shares_ptr, batch, num_tokens, capacity, num_splits, window_left, SPEC
    )
    first_token = tile * SPEC.TILE_TOKENS
    if first_token >= query_len:
        return
    seq_len = _load_length(seq_lens_ptr, b, batch, capacity, query_len, SPEC)
    m_range = tl.arange(0, SPEC.BLOCK_M)
    token = first_token + m_range // SPEC.TILE_HEADS
    kv_head, head_tile = tl.program_id(1) // SPEC.HEAD_TILES, tl.program_id(1) % SPEC.HEAD_TILES
    group_head = head_tile * SPEC.TILE_HEADS + m_range % SPEC.TILE_HEADS
    row_mask = (m_range < SPEC.TILE_HEADS * SPEC.TILE_TOKENS) & (token < query_len) & (group_head < SPEC.GROUP)
    row = (first_row + token).to(tl.int64)
    head = kv_head * SPEC.GROUP + group_head
    start = seq_len - query_len  # position of the sequence's first query row
    last_token = tl.minimum(first_token + SPEC.TILE_TOKENS, query_len) - 1
    windows = (window_left, window_right)
    key_range = _key_range(start + first_token, start + last_token, seq_len, split, num_splits, windows, SPEC)
    rows = _load_rows(query, row, head, row_mask, start + token, alibi_ptr, SPEC)
    state = _first_state(sinks_ptr, head, tl.where((split == 0) & (b < batch), row_mask, False), SPEC)
    keys = _of_head(key, kv_head, num_blocks, SPEC.D, SPEC.BLOCK_D, SPEC)
    cache = keys + _of_head(value, kv_head, num_blocks, SPEC.DV, SPEC.BLOCK_DV, SPEC)
    table = (table.ptr + b.to(tl.int64) * table_stride_row, table.stride_column, num_blocks)
    if new is not None:  # noqa: SIM102 (known while compiling, unlike the other)
        if (split == 0) & (head_tile == 0):
            store_new(new, num_slots, cache, b, kv_head, num_blocks, SPEC)
    k_scale, k_factor = _scale_of_head(k_scale, kv_head, SPEC.K_TOKENS)
    v_scale, v_factor = _scale_of_head(v_scale, kv_head, SPEC.V_TOKENS)
    if SPEC.K_FORMAT != "" and not SPEC.K_TOKENS:
        scale *= k_factor
    scales = (scale, softcap, k_scale, v_scale)
    state = _attend(state, key_range, rows, cache, table, new, num_slots, kv_head, windows, scales, SPEC)
    if SPEC.V_FORMAT != "" and not SPEC.V_TOKENS:
        state = (state[0] * v_factor, state[1], state[2])
    if SPEC.DEPENDENT:
        gdc_launch_dependents()
    _store_rows(out_ptr, lse_ptr, _out_row(row, head, split, num_splits, SPEC), row_mask, state, SPEC)
