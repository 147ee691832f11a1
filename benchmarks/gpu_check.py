"""The first minutes on a machine with a CUDA GPU: four calls, each within its own time.

    python3 benchmarks/gpu_check.py right --out DIR      at most 5 minutes: is everything right?
    python3 benchmarks/gpu_check.py figures --out DIR    at most 6 minutes: how fast is it, and how near to the floor?
    python3 benchmarks/gpu_check.py tune --out DIR       at most 8 minutes: which tiles are fastest here?
    python3 benchmarks/gpu_check.py profile --out DIR    at most 5 minutes: counters and memory checks of one launch

Nothing is built or installed: torch, Triton (which wants a C compiler) and transformers are enough; pytest, ncu and
compute-sanitizer are used where they are there. Each call writes DIR/PART.json after every
step, goes on where a step fails, hangs or loses the device, and ends in time by itself; what no longer fits is named as
left out. A figure stands beside its floor (bytes over the measured bandwidth, operations over the measured peak) and
is refused where the result is wrong. ``--rehearse`` runs a part in small without a device, on Triton's interpreter.

Where ``right`` fails, look first: ``--only NAME`` runs a step alone, PAGEDKV_CHECK=1 names bad indices, and another
Triton or ``num_splits=1`` tells a compiler's fault from a kernel's. Figures of what is right are worth having all the
same. ``tune`` leaves the source alone and writes DIR/tuned.py: copy it over pagedkv_ops/_triton/tuned.py, make the
compile report (``make report``) and run ``figures`` once more. Keep the JSON files under benchmarks/gpu/.

Exit status: 0 all that ran is right, 1 something failed (DIR/PART.json says what) or nothing ran, 2 no device.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

SECONDS = {"right": 290.0, "figures": 350.0, "tune": 470.0, "profile": 290.0}
_MODULES = {"right": "right", "figures": "figures", "tune": "tuning", "profile": "profiling"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=SECONDS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, help="time limit, instead of the part's own")
    parser.add_argument(
        "--only", default="", help="regular expression: steps whose names hold it, and what they require"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a device")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)  # of the process that does the work
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        parser.exit()
    return parser.parse_args(arguments)


def work(options: argparse.Namespace) -> int:
    """The part itself, in a process that ``supervise`` watches."""
    import torch
    from gpu import device
    from gpu.report import Report, described
    from gpu.supervisor import LOST

    if not device.REHEARSAL and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; nothing was measured (--rehearse needs none)", file=sys.stderr)
        return 2
    device.prepare()
    report = Report(options.out / f"{options.part}.json", options.deadline, options.only)
    try:
        if importlib.import_module(f"gpu.{_MODULES[options.part]}").run(report, options.out) is False:
            return LOST
    except Exception as error:  # of a part itself; its steps catch their own
        traceback.print_exc()
        report.add("part", {"error": described(error)})
    report.write()
    text, is_right = report.verdict()
    print(text, flush=True)
    return 0 if is_right else 1


def main() -> int:
    options = parse()
    options.out = options.out.resolve()
    if options.deadline is not None:
        return work(options)
    from gpu.supervisor import supervise

    options.out.mkdir(parents=True, exist_ok=True)
    command = [str(Path(__file__).resolve()), options.part, "--out", str(options.out), "--only", options.only]
    seconds = options.seconds or SECONDS[options.part]
    return supervise(command, options.out / f"{options.part}.json", seconds, options.rehearse)


if __name__ == "__main__":
    sys.exit(main())
