"""Part "tune": which tiles, warps and stages of attention are fastest on this device.

For each row of the table, the most used first: candidates around the present one are compiled in processes side by
side, each is compared with dense attention, and then they are timed one after the other. ``tuned.py`` in the output
folder is the table with what was found; a row changes only for a gain beyond the noise. Before it replaces
``pagedkv_ops/_triton/tuned.py``, the compile report must find no spills in the new rows.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from . import device, inputs, parallel, timing
from .device import REHEARSAL
from .inputs import Shape, batch
from .parallel import Call
from .report import ENVIRONMENT, Record, Report, Step

KEYS = [(kind, 2, width) for width in (128, 64, 256) for kind in ("decode", "prefill")]  # kind, operand bytes, width
_GAIN = 0.97  # of the present row's time: less is noise
_FORK = {"PAGEDKV_GPU_FORK": "1"}  # launchers may keep plans: no candidate sees those of another


def shapes(kind: str, width: int) -> list[Shape]:
    sizes = {"head_size": width, "layout": "HND"}
    if kind == "decode":
        found = [batch("many", 64, 1, 4096, **sizes), batch("one", 1, 1, 16384, **sizes)]
    else:
        found = [batch("prompts", 2, 2048, 2048, **sizes), batch("chunk", 1, 512, 8192, **sizes)]
    return [shape.small() for shape in found] if REHEARSAL else found


def arch() -> str:
    import torch

    from pagedkv_ops._triton import config

    return str(config.device(torch.empty(0, device=device.DEVICE))[0])


def _table() -> dict[Any, Any]:
    from pagedkv_ops._triton import tuned

    table: dict[Any, Any] = tuned.TABLE
    return table


def _set_row(key: list[Any], row: list[Any]) -> None:
    from pagedkv_ops._triton import replay

    _table()[tuple(key)] = tuple(row)
    replay.forget()  # plans of calls were made with the row before


_REHEARSED = "# Of a rehearsal: times of an interpreter, nothing to keep.\n"


def _tool() -> Any:
    """The developers' tuner, which knows how rows vary and how the table is written."""
    from tools import tune

    return tune


def candidates(key: Any) -> list[Any]:
    arch, kind, itemsize, width = key
    rows = list(_tool().candidates(_table()[key], kind, width, arch == "sm_90" and itemsize == 2))
    return rows[:3] if REHEARSAL else rows


def attempt(key: list[Any], row: list[Any]) -> Record:
    """Compile a candidate and compare its results; it raises where the row needs too much, or is wrong."""
    import pagedkv_ops

    _set_row(key, row)
    for shape in shapes(key[1], key[3]):
        one = inputs.make(shape)
        inputs.assert_right(one, pagedkv_ops.paged_attention(*one.attention_args))
    return {}


def measure(key: list[Any], row: list[Any]) -> Record:
    import pagedkv_ops

    _set_row(key, row)
    times = {}
    for shape in shapes(key[1], key[3]):
        sets = [inputs.make(shape, seed) for seed in range(min(4, timing.copies(shape.bytes())))]
        calls = [partial(pagedkv_ops.paged_attention, *one.attention_args) for one in sets]
        times[shape.name] = timing.milliseconds(calls)["milliseconds"]
    return {"milliseconds": times}


def choose(present: Any, times: dict[Any, dict[str, float]]) -> tuple[Any, float]:
    """The row with the smallest geometric mean of its times over the present row's, and that mean."""
    base = times[present]

    def relative(row: Any) -> float:
        return statistics.geometric_mean(times[row][name] / base[name] for name in base)

    best = min(times, key=relative)
    return (best, relative(best)) if relative(best) < _GAIN else (present, 1.0)


def tune(key: Any, deadline: float, out: Path) -> Record:
    """``deadline``: ``time.time()``. The present row is measured first; half of the time is for compiling at most."""
    table, rows = _table(), candidates(key)
    present = rows[0]
    names = {f"{key} {row}": row for row in rows}
    start = time.time()
    trials = [Call(name, "gpu.tuning:attempt", (key, row)) for name, row in names.items()]
    tried = dict(parallel.run(trials, start + (deadline - start) / 2, env=_FORK))
    right = [name for name in names if not {"error", "left_out"} & set(tried[name])]
    record: Record = {"present": list(present), "candidates": len(rows), "right": len(right)}
    reasons = [tried[name]["error"][:80] for name in names if "error" in tried[name]]
    record["passed_over"] = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    if f"{key} {present}" not in right:
        raise RuntimeError(f"the present row {present} fails: {tried[f'{key} {present}']}")
    timings = [Call(name, "gpu.tuning:measure", (key, names[name])) for name in right]
    measured = dict(parallel.run(timings, deadline, count=1, env=_FORK))
    times = {names[name]: r["milliseconds"] for name, r in measured.items() if "milliseconds" in r}
    best, ratio = choose(present, times)
    table[key] = best
    (out / "tuned.py").write_text((_REHEARSED if REHEARSAL else "") + _tool().render(table))
    spread = {str(list(row)): took for row, took in sorted(times.items(), key=lambda item: math.prod(item[1].values()))}
    return record | {"timed": len(times), "best": list(best), "time_of_present": ratio, "milliseconds": spread}


def run(report: Report, out: Path) -> bool:
    name = arch()
    keys = [(name, *key) for key in KEYS if (name, *key) in _table()]
    for key in keys:  # of an earlier process of this run
        row = report.steps.get(_name(key), {}).get("best")
        if row is not None:
            _table()[key] = tuple(row)
    steps = [Step(ENVIRONMENT, 0, device.facts)]
    for i, key in enumerate(keys):
        share = lambda i=i: time.time() + report.left() / min(2, len(keys) - i)  # noqa: E731  (the first get most)
        steps.append(Step(_name(key), 40, lambda key=key, share=share: tune(key, share(), out)))
    return report.run(steps, device.is_lost)


def _name(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))
