"""The roofline picture of bench_ops.py: attained GFLOP/s against FLOPs per byte, under the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

MARKERS = {"decode": "o", "prefill": "s"}


class Row(Protocol):
    kind: str
    name: str  # begins with the data type
    ceiling: float  # decode: GB/s read in sequence; prefill: GFLOP/s of torch.mm
    intensity: float | None  # FLOPs per byte
    speeds: dict[str, float]  # in the unit of the ceiling


def draw(rows: Sequence[Row], path: str) -> None:
    """One panel per data type with decode and prefill rows of every contender.

    The slanted roof is the fastest sequential read, the flat one the fastest torch.mm among the rows; either is left
    out where no row has it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.intensity]
    types = list(dict.fromkeys(row.name.split()[0] for row in rows))
    if not types:
        raise SystemExit("--plot: expected decode or prefill rows, got none")
    names = sorted({name for row in rows for name in row.speeds}, key=lambda name: (name != "pagedkv", name))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    read = max((row.ceiling for row in rows if row.kind == "decode"), default=None)
    size = (5 * len(types), 4.5)
    figure, axes = pyplot.subplots(1, len(types), figsize=size, sharex=True, sharey=True, squeeze=False)
    for panel, dtype in zip(axes[0], types, strict=True):
        own = [row for row in rows if row.name.split()[0] == dtype]
        _roof(panel, own, read)
        for row in own:
            for name, speed in row.speeds.items():
                attained = speed * row.intensity if row.kind == "decode" else speed
                panel.plot(row.intensity, attained, MARKERS[row.kind], color=colors[name], markersize=5)
        panel.set(xscale="log", yscale="log", title=dtype, xlabel="FLOP per byte")
    axes[0][0].set_ylabel("GFLOP/s")
    handles = [pyplot.Line2D([], [], color=colors[name], marker="o", linestyle="", label=name) for name in names]
    handles += [pyplot.Line2D([], [], color="gray", marker=m, linestyle="", label=kind) for kind, m in MARKERS.items()]
    axes[0][0].legend(handles=handles, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _roof(panel: Any, rows: Sequence[Row], read: float | None) -> None:
    peak = max((row.ceiling for row in rows if row.kind == "prefill"), default=None)
    highest = max(row.intensity or 1 for row in rows)
    steps = [(2 * highest) ** (i / 50) for i in range(51)]
    roof = [min(read * x if read else float("inf"), peak or float("inf")) for x in steps]
    panel.plot(steps, roof, color="black", linewidth=1)
    if peak:
        panel.annotate(f"torch.mm {peak:.0f} GFLOP/s", (steps[-1], peak), ha="right", va="bottom", fontsize=7)
    if read:
        panel.annotate(f"read {read:.0f} GB/s", (steps[0], roof[0]), ha="left", va="bottom", fontsize=7)
