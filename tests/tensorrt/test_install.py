"""install() and uninstall(): idempotent, and complete."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

from pagedkv.integrations import torch_tensorrt as integration


def _state() -> tuple[Any, ...]:
    from torch_tensorrt import dynamo
    from torch_tensorrt.dynamo import _exporter
    from torch_tensorrt.dynamo.backend import backends
    from torch_tensorrt.dynamo.lowering.passes import _aten_lowering_pass as lowering

    post, pre = lowering.ATEN_POST_LOWERING_PASSES.passes, lowering.ATEN_PRE_LOWERING_PASSES.passes
    return list(post), list(pre), backends._pretraced_backend, dynamo.export, _exporter.export


def test_install_is_idempotent_and_can_be_undone() -> None:
    stock = _state()
    integration.install()
    once = _state()
    integration.install()
    assert _state() == once
    assert [len(a) - len(b) for a, b in zip(once[:2], stock[:2], strict=True)] == [3, 1]
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
