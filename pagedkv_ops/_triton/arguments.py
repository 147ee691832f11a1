"""Groups of arguments of the attention kernel; Triton 3.6 to 3.9 read their fields, compiled and interpreted."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Of [T, H, D]."""

    ptr: Any
    stride_token: int
    stride_head: int


class Cache(NamedTuple):
    """Of [N, S, Hkv, D]."""

    ptr: Any
    stride_block: int
    stride_slot: int
    stride_head: int


class Table(NamedTuple):
    """Of [B, W]; the stride of a row is an argument of its own, as no kernel should be compiled for its divisors."""

    ptr: Any
    stride_column: int


class New(NamedTuple):
    """What an append writes: [T, Hkv, D], [T, Hkv, Dv] and [<= T]."""

    key_ptr: Any
    value_ptr: Any
    slots_ptr: Any
    key_stride_token: int
    key_stride_head: int
    value_stride_token: int
    value_stride_head: int


class Spec(NamedTuple):
    """What the kernel is compiled for. Fields only: a cached kernel is found by them."""

    NUM_HEADS: int
    GROUP: int  # query heads per KV head
    BLOCK_SIZE: int
    D: int
    DV: int
    CAUSAL: bool
    WINDOW_LEFT: bool
    WINDOW_RIGHT: bool
    SOFTCAP: bool
    SERIES: bool  # for a large softcap
    ALIBI: bool
    SPLIT: bool
    ROWS: int  # which sequences, see ``shares``
    SHARES: int  # 0, or a power of two that the batch fits in, whose keys the programs share
    MIN_TILES: int  # of keys in a share
    MAX_SPLITS: int  # of a sequence
    DEPENDENT: bool  # the launch that follows may start early, and waits itself
    ONE_LOOP: bool  # same instructions for every key tile: bits do not depend on how rows are cut into tiles
    # a large float32 query does not fit in registers beside the rest: its rows are read from shared memory per tile
    RELOAD: bool
    K_FORMAT: str  # of stored elements, see ``quantised``
    V_FORMAT: str
    K_TOKENS: bool  # each token and head has a scale of its own
    V_TOKENS: bool
    COMPUTE: Any  # operand type of the matrix products
    OFFSETS: Any  # integers that hold slot * stride and column * stride
    SAME_STRIDES: bool  # of keys and values
    SLOTS: int  # keys of a tile that share a block id
    BOXED: bool  # these are loaded as a box, by a descriptor
    HEAD_TILES: int  # per group
    TILE_HEADS: int
    TILE_TOKENS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
