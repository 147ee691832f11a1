"""A process of ``parallel``: a line of JSON in, the call's result as a line of JSON out.

With ``PAGEDKV_GPU_FORK=1`` every call runs in a fork that has the imports but no device yet: what one call caches or
changes, no other one sees.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from . import device
from .report import described


def _result(function: str, args: list[Any]) -> dict[str, Any]:
    module, name = function.split(":")
    try:
        return getattr(importlib.import_module(module), name)(*args) or {}
    except Exception as error:
        trace = traceback.format_exc().splitlines()[-12:]
        return {"error": described(error), "trace": trace, "lost": device.is_lost()}


def _forked_result(function: str, args: list[Any]) -> dict[str, Any]:
    """Of a child; its end without a result is one too."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(_result(function, args), default=str))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    record: dict[str, Any] = json.loads(text) if text else {"error": f"its process ended with wait status {status}"}
    record.pop("lost", None)  # with the child
    return record


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a call prints must not end up among the replies
    device.prepare()
    call = _result
    if os.environ.get("PAGEDKV_GPU_FORK") == "1":
        import pagedkv_ops._triton  # noqa: F401  (once, for all calls)

        call = _forked_result
    for line in sys.stdin:
        replies.write(json.dumps(call(*json.loads(line)), default=str) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
