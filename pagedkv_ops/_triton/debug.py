"""Checks of what index tensors hold. They wait for the device, so they run only under ``PAGEDKV_CHECK=1``.

A graph under capture can not wait: there they are off, and the kernels skip what is out of range.
"""

from __future__ import annotations

import os

from torch import Tensor

from .. import value_checks
from ..arguments import Attention
from . import launch


def enabled() -> bool:
    return os.environ.get("PAGEDKV_CHECK") == "1" and not launch.capturing()


def check_write(
    op: str,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    # reads no data: always
    value_checks.check_distinct_caches(op, key_cache, value_cache, k_scale_cache, v_scale_cache)
    launch.compares(key_cache, value_cache)
    if k_scale_cache is not None and v_scale_cache is not None:
        launch.compares(k_scale_cache, v_scale_cache)
    if not enabled():
        return
    value_checks.check_fixed_scale(op, "k_scale", k_scale)
    value_checks.check_fixed_scale(op, "v_scale", v_scale)
    value_checks.check_numbers(op, "key", key, slot_mapping, key_cache)
    value_checks.check_numbers(op, "value", value, slot_mapping, value_cache)
    value_checks.check_slots(op, slot_mapping, key_cache)
    writer: dict[int, int] = {}
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0 and writer.setdefault(slot, i) != i:
            raise RuntimeError(
                f"{op}: slot_mapping[{i}] must name a slot of its own, got {slot} like slot_mapping[{writer[slot]}]"
            )


def check_attention(op: str, attention: Attention) -> None:
    if enabled():
        value_checks.check_attention_values(op, attention)


def check_gather(cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_len: int) -> None:
    if enabled():
        value_checks.check_gather_values(cache, block_table, seq_lens, max_len)


def check_block_mapping(op: str, block_mapping: Tensor, num_src: int, num_dst: int) -> None:
    if enabled():
        value_checks.check_block_mapping(op, block_mapping, num_src, num_dst)
