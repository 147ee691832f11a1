"""``python -m gpu.launches NAME``: one launch of an op between the profiler's marks, for the tools of ``profiling``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import device, inputs
from .device import DEVICE, DTYPE, REHEARSAL
from .inputs import SHAPES, Shape, batch


def _attention(shape: Shape) -> Callable[[], Any]:
    import pagedkv_ops

    return partial(pagedkv_ops.paged_attention, *inputs.make(shape).attention_args)


def _append(batch_size: int) -> Callable[[], Any]:
    """Each sequence's new token goes to the last slot of its last block."""
    import pagedkv_ops

    one = inputs.make(batch("append", batch_size, 1, 48, **_SMALL))
    heads, size = one.key_cache.shape[2:]
    new = torch.randn(2, batch_size, heads, size, device=DEVICE).to(DTYPE)
    slots = one.block_table[:, -1].long() * 16 + 15
    query, key_cache, value_cache, table, seq_lens, _ = one.attention_args
    args = (query, *new, key_cache, value_cache, slots, table, seq_lens)
    return partial(pagedkv_ops.paged_attention_append, *args)


def _write(tokens: int) -> Callable[[], Any]:
    import pagedkv_ops

    key, value = torch.randn(2, tokens, 8, 128, device=DEVICE).to(DTYPE)
    caches = torch.zeros(2, 4 * tokens // 16 + 1, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    slots = torch.randperm(4 * tokens, device=DEVICE)[:tokens]
    return partial(pagedkv_ops.write_kv, key, value, *caches, slots)


def _copy() -> Callable[[], Any]:
    import pagedkv_ops

    caches = list(torch.randn(2, 12, 16, 8, 128, device=DEVICE).to(DTYPE))
    return partial(pagedkv_ops.copy_blocks, caches, torch.tensor([[0, 1], [1, 2], [2, 0]], device=DEVICE))


_SMALL: dict[str, Any] = (
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 16} if REHEARSAL else {"num_heads": 8, "num_kv_heads": 2}
)
# for the memory checkers, which slow a kernel down a hundred times
SMALL: dict[str, Callable[[], Callable[[], Any]]] = {
    "small decode": lambda: _attention(batch("decode", 4, 1, 300 if not REHEARSAL else 20, **_SMALL)),
    "small splits": lambda: _attention(batch("splits", 1, 1, 4000 if not REHEARSAL else 20, **_SMALL)),
    "small mixed": lambda: _attention(Shape("mixed", ((1, 70), (40, 40), (9, 64)), "HND", **_SMALL)),
    "small append": lambda: _append(4),
    "small write": lambda: _write(16),
    "small copy": _copy,
}
# for the profiler: the launches that figures are reported of
LARGE: dict[str, Callable[[], Callable[[], Any]]] = {
    name: partial(_attention, SHAPES[name])
    for name in (
        "decode B=64 L=8192 HND",
        "prefill B=1 L=8192 HND",
        "decode B=1 L=16384 HND",
        "mixed 63 decodes of 8192, a chunk of 512",
    )
} | {"write": lambda: _write(16 if REHEARSAL else 16384)}


def main(name: str) -> None:
    device.prepare()
    call = (SMALL | LARGE)[name]()
    if name in LARGE:
        call()  # compiles, outside the marks
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(f"launched {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
