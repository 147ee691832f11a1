"""Runs Triton in a process of its own: its interpreter must be switched on, or off, before Triton is imported.

With ``PAGEDKV_TEST_DEVICE=cuda`` the same tests run on the GPU: what a function gets lies there, and what it returns
comes back to the CPU. Messages are length-prefixed ``torch.save`` bytes, so that views of one storage stay such views.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

_ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("PAGEDKV_TEST_DEVICE", "cpu")


def _send(stream: BinaryIO, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(struct.pack("<q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def _receive(stream: BinaryIO, device: str) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", header)[0])), map_location=device, weights_only=False)


def _call_op(name: str, args: Any, options: Any) -> Any:
    from pagedkv_ops import _triton

    return getattr(_triton, name)(*args, **options), args


class Kernels:
    def __init__(self, **env: str) -> None:
        """``env`` adds to the environment; without it the ops are interpreted, or run on the GPU."""
        defaults = {
            "PAGEDKV_CPU": "reference",
            "PYTHONWARNINGS": "ignore",
            "TRITON_INTERPRET": str(int(DEVICE == "cpu")),
        }
        env = os.environ | defaults | env
        command = [sys.executable, "-m", "tests.triton.worker"]
        self._process = subprocess.Popen(command, cwd=_ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)`` in the other process; it must be importable there. Errors are raised here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, (function, args))
        result, error, trace = _receive(self._process.stdout, "cpu")
        if error is not None:
            raise error from RuntimeError(trace)
        return result

    def op(self, name: str, *args: Any, **options: Any) -> Any:
        """The Triton op's result."""
        return self.run(_call_op, name, args, options)[0]

    def op_and_args(self, name: str, *args: Any, **options: Any) -> Any:
        """The result, and the positional arguments as the op left them."""
        return self.run(_call_op, name, args, options)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _plain_call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _serve() -> None:
    torch.set_default_device(DEVICE)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the functions must not end up among the replies
    call = _plain_call
    if os.environ["TRITON_INTERPRET"] == "1":
        from .interpreter_checks import checked_call as call
    while True:
        try:
            function, args = _receive(requests, DEVICE)
        except EOFError:
            return
        try:
            reply = (call(function, *args), None, "")
        except Exception as error:
            reply = (None, error, traceback.format_exc())
        _send(replies, reply)


if __name__ == "__main__":
    _serve()
