"""``python -m tools.tune``: measures configurations on this GPU and rewrites its rows of the table.

Candidates vary the keys of a tile, warps and stages around the present row, of prefill also its rows and, on sm_90, how
keys and values are loaded. One that
gives a result different from the present row's is passed over; the rest are ranked by the sum of their times.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

from pagedkv_ops._triton import attention, config, replay, tuned

Row = tuple[int, ...]  # see ``config.Config``
_FILE = Path(tuned.__file__)
_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_SHAPES = {"decode": ((64, 1, 4096), (1, 1, 16384)), "prefill": ((2, 2048, 2048), (1, 512, 8192))}  # B, queries, keys


def render(table: dict[tuple[str, str, int, int], Row]) -> str:
    """The text of ``tuned.py`` with this table."""
    head = _FILE.read_text().split("TABLE = {")[0]
    rows = (f'    ("{a}", "{kind}", {size}, {width}): {row},\n' for (a, kind, size, width), row in table.items())
    return head + "TABLE = {\n" + "".join(rows) + "}\n"


def candidates(row: Row, kind: str = "decode", width: int = 128, boxes: bool = False) -> list[Row]:
    """The present row first, then its neighbours; of prefill also wider tiles and fewer stages, with boxes on sm_90."""
    block_m, block_n, warps, stages, blocks = row[:5]  # how many blocks run at once the compiled kernel tells
    prefill = kind == "prefill"
    around = itertools.product(
        sorted({64, 128, block_m}) if prefill else [block_m],
        [block_n, block_n * 2] if prefill else sorted({max(16, block_n // 2), block_n, block_n * 2}),
        sorted({4, 8, warps}),
        sorted({2, 3, stages}) if prefill else sorted({max(1, stages - 2), stages, stages + 2}),
        [(), (True,)] if prefill and boxes else [()],
    )
    rows = [(m, n, w, s, blocks, *boxed) for m, n, w, s, boxed in around if not prefill or m * width <= 2048 * w]
    return [row, *(each for each in rows if each != row)]  # above: 64 registers of a thread for the sums of values


def _inputs(kind: str, itemsize: int, width: int) -> list[tuple[Tensor, ...]]:
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    result = []
    for batch, query_len, seq_len in _SHAPES[kind]:
        columns = seq_len // _BLOCK_SIZE
        caches = torch.randn(2, batch * columns, _BLOCK_SIZE, _KV_HEADS, width, dtype=dtype, device="cuda")
        table = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
        query = torch.randn(batch * query_len, _HEADS, width, dtype=dtype, device="cuda")
        lengths = torch.full((batch,), seq_len, dtype=torch.int32, device="cuda")
        boundaries = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * query_len
        result.append((query, *caches, table, lengths, boundaries if kind == "prefill" else None))
    return result


def _seconds(inputs: list[tuple[Tensor, ...]], expected: list[Tensor]) -> float:
    from triton.testing import do_bench

    total = 0.0
    for args, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(attention.paged_attention(*args), wanted, rtol=2e-2, atol=2e-2)
        total += do_bench(lambda args=args: attention.paged_attention(*args), warmup=10, rep=40, return_mode="median")
    return total


def main() -> None:
    arch, _ = config.device(torch.empty(0, device="cuda"))
    for key, present in list(tuned.TABLE.items()):
        if key[0] != arch or key[3] > 256:  # the widest heads have but one configuration that fits
            continue
        inputs = _inputs(*key[1:])
        expected = [attention.paged_attention(*args) for args in inputs]
        times: dict[Row, float] = {}
        for row in candidates(present, key[1], key[3], key[0] == "sm_90" and key[2] == 2):
            tuned.TABLE[key] = row
            replay.forget()
            try:
                times[row] = _seconds(inputs, expected)
            except Exception as error:  # too much shared memory, or a wrong result
                print(f"{key} {row}: {type(error).__name__}", flush=True)
        tuned.TABLE[key] = best = min(times, key=times.__getitem__)
        print(f"{key}: {present} {times.get(present, float('nan')):.3f} ms -> {best} {times[best]:.3f} ms", flush=True)
        _FILE.write_text(render(tuned.TABLE))


if __name__ == "__main__":
    main()
