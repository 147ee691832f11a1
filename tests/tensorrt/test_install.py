"""install() and uninstall(): idempotent, and complete."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

from pagedkv.integrations import torch_tensorrt as integration


def _state() -> tuple[list[Any], Any]:
    from torch_tensorrt.dynamo.backend import backends
    from torch_tensorrt.dynamo.lowering.passes._aten_lowering_pass import ATEN_POST_LOWERING_PASSES

    return list(ATEN_POST_LOWERING_PASSES.passes), backends._pretraced_backend


def test_install_is_idempotent_and_can_be_undone() -> None:
    stock = _state()
    integration.install()
    once = _state()
    integration.install()
    assert _state() == once
    assert len(once[0]) == len(stock[0]) + 3
    importlib.reload(integration).install()
    assert _state() == once
    integration.uninstall()
    assert _state() == stock
    integration.uninstall()
    assert _state() == stock


def test_without_torch_tensorrt_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch_tensorrt'] = None\n"
        "from pagedkv.integrations.torch_tensorrt import install\n"
        "try: install()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "torch_tensorrt can not be imported" in done.stdout
    assert "pagedkv[tensorrt]" in done.stdout
