"""A decode step captured once and replayed for every length that its tables hold, against the reference."""

from __future__ import annotations

from typing import Any

import torch

from .checks import LIMITS, assert_rows_close
from .device import DEVICE, DTYPE, REHEARSAL
from .timing import capture

_S = 16
_BATCH, _COLUMNS, _HEADS, _KV_HEADS, _D = (2, 3, 4, 2, 16) if REHEARSAL else (32, 64, 8, 2, 128)
_STRIDE = 11 if REHEARSAL else 1  # of the lengths


class Step:
    """Static buffers of a step; block 0 is nobody's, so that padding has a place to point to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = 1 + torch.randperm(_BATCH * _COLUMNS).view(_BATCH, _COLUMNS)
        cache = (_BATCH * _COLUMNS + 1, _KV_HEADS, _S, _D)
        self.host = {
            "query": torch.randn(_BATCH, _HEADS, _D).to(DTYPE),
            "key": torch.randn(_BATCH, _KV_HEADS, _D).to(DTYPE),
            "value": torch.randn(_BATCH, _KV_HEADS, _D).to(DTYPE),
            "key_cache": torch.randn(cache).to(DTYPE),
            "value_cache": torch.randn(cache).to(DTYPE),
            "slot_mapping": torch.full((_BATCH,), -1),
            "block_table": self.table.to(torch.int32),
            "seq_lens": torch.zeros(_BATCH, dtype=torch.int32),
        }
        self.device = {name: tensor.to(DEVICE) for name, tensor in self.host.items()}

    def fill(self, lengths: list[int]) -> None:
        """The last token of each sequence is new; of an empty one there is none."""
        slots = [int(self.table[b, (n - 1) // _S]) * _S + (n - 1) % _S if n else -1 for b, n in enumerate(lengths)]
        for name, values in (("slot_mapping", slots), ("seq_lens", lengths)):
            self.host[name].copy_(torch.tensor(values))
            self.device[name].copy_(self.host[name])

    def arguments(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        caches = {name: tensors[name].transpose(1, 2) for name in ("key_cache", "value_cache")}
        return tensors | caches


def every_length(num_splits: int) -> dict[str, Any]:
    """``num_splits`` as the op takes it: 0 leaves it to the launcher, 1 promises the same bits in any batch."""
    import pagedkv_ops
    from pagedkv_ops import reference

    step = Step()
    results: list[torch.Tensor] = []

    def call() -> None:
        out = pagedkv_ops.paged_attention_append(**step.arguments(step.device), num_splits=num_splits)
        results[:] = [out]

    step.fill([1] * _BATCH)
    call()  # compiles; the new tokens of length 1 are then in both caches
    reference.paged_attention_append(**step.arguments(step.host))
    graph = capture([call])
    (out,) = results
    lengths = list(range(0, _COLUMNS * _S + 1, _STRIDE))
    for start in range(0, len(lengths), _BATCH):
        part = (lengths[start : start + _BATCH] + [0] * _BATCH)[:_BATCH]
        step.fill(part)
        out.fill_(torch.nan)
        graph.replay()
        expected = reference.paged_attention_append(**step.arguments(step.host))
        try:
            assert_rows_close(out.cpu(), expected, LIMITS[DTYPE])
        except AssertionError as error:
            raise AssertionError(f"lengths {part[0]} to {max(part)}: {error}") from error
    for name in ("key_cache", "value_cache"):
        assert torch.equal(step.device[name].cpu(), step.host[name]), f"{name} has other content afterwards"
    return {"lengths": len(lengths), "from": lengths[0], "to": lengths[-1]}
