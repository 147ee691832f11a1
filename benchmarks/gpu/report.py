"""The JSON file of a part: written anew after every step, so that nothing is lost with the machine."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import parallel

Record = dict[str, Any]
RUNNING = "running"
ENVIRONMENT = "environment"  # the step that reports facts alone
_UNDONE = ("error", "left_out", "refused", "skipped")


class Step(NamedTuple):
    name: str
    seconds: float  # it is left out where less is left
    call: Callable[[], Any]
    requires: tuple[str, ...] = ()  # steps whose results must be right before this one may report anything


def described(error: BaseException) -> str:
    """An error's type and the first 400 characters of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


class Report:
    """Results by name of step. A second process goes on where the first was lost.

    Args:
        path: the JSON file.
        deadline: ``time.time()`` of the end.
        only: regular expression; steps whose names do not hold it are passed by, unless one that does requires them.
    """

    def __init__(self, path: Path, deadline: float, only: str = "") -> None:
        self.path, self.deadline, self.only = path, deadline, only
        self.steps: dict[str, Record] = json.loads(path.read_text())["steps"] if path.exists() else {}

    def wants(self, name: str) -> bool:
        return re.search(self.only, name) is not None

    def left(self) -> float:
        return self.deadline - time.time()

    def write(self, running: str | None = None) -> None:
        content = {"failures": self.failures(), "steps": self.steps, RUNNING: running}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1, default=str) + "\n")
        os.replace(draft, self.path)

    def failures(self) -> list[str]:
        """Wrong results, errors and lost steps; not what was left out, skipped or refused for another's failure."""
        return [f"{name}: {record['error']}" for name, record in self.steps.items() if "error" in record]

    def verdict(self) -> tuple[str, bool]:
        """What to say at the end; and whether any step ran and none failed."""
        records = [record for name, record in self.steps.items() if name != ENVIRONMENT]
        counts = {kind: sum(kind in record for record in records) for kind in _UNDONE}
        num_right = sum(not set(_UNDONE) & set(record) for record in records)
        undone = [f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count]
        text = ", ".join([f"{num_right} steps right" if num_right else "no step ran to its end", *undone])
        failures = self.failures()
        return "\n".join([*failures, text]), num_right > 0 and not failures

    def add(self, name: str, record: Record) -> None:
        self.steps[name] = record
        self.write()
        print(f"{name}: {_line(record)}", flush=True)

    def run(self, steps: list[Step], is_lost: Callable[[], bool] = lambda: False) -> bool:
        """Steps that have no result yet; False where the device is lost, and another process must go on."""
        wanted = [step for step in steps if self.wants(step.name)]
        names = {name for step in wanted for name in (step.name, *step.requires)}
        for step in steps:
            if step.name in self.steps or step.name not in names:
                continue
            wrong = [name for name in step.requires if _is_wrong(self.steps.get(name))]
            if wrong:
                self.add(step.name, {"refused": f"no figures without right results of: {', '.join(wrong)}"})
            elif self.left() < step.seconds:
                self.add(step.name, {"left_out": f"needs about {step.seconds:.0f} s of {self.left():.0f} left"})
            else:
                self.write(step.name)
                self.add(step.name, self._result(step))
                if "error" in self.steps[step.name] and is_lost():
                    return False
        return True

    def run_parallel(self, calls: list[parallel.Call], env: Mapping[str, str] = {}) -> None:
        """As ``run``, in processes side by side; a lost device costs one of them."""
        todo = [call for call in calls if call.name not in self.steps and self.wants(call.name)]
        for name, record in parallel.run(todo, self.deadline, env=env):
            self.add(name, record)

    def _result(self, step: Step) -> Record:
        start = time.perf_counter()
        try:
            record = dict(step.call() or {})
        except Exception as error:  # one shape's failure is a finding, not the end of the run
            record = {"error": described(error), "trace": traceback.format_exc().splitlines()[-12:]}
        return record | {"seconds": round(time.perf_counter() - start, 1)}


def _is_wrong(record: Record | None) -> bool:
    return record is None or bool({"error", "left_out", "refused"} & set(record))


def _line(record: Record) -> str:
    """A record in one line of a log: numbers short, long texts and lists left to the file."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in record.items() if k != "trace"}
    return json.dumps(shown, default=str)[:300]
