"""Nothing is compiled while serving: ``warm_up`` knows what steps launch, and a capture refuses what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagedkv_ops

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

from pagedkv_ops import _triton, warming
from tools.fake_driver import FakeDriver

HQ, HKV, D, S, COLUMNS, BATCH, TOKENS = 8, 2, 64, 16, 64, 40, 300
OPTIONS: dict[str, Any] = {"window_left": 100}


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 8, S, HKV, D, dtype=torch.bfloat16).unbind(0)


def warm() -> int:
    return warming._compile_steps(caches(), HQ, BATCH, TOKENS, COLUMNS, torch.bfloat16, OPTIONS)


def step(batch: int, tokens: int, columns: int, packed: bool) -> None:
    query = torch.zeros(tokens, HQ, D, dtype=torch.bfloat16)
    new = torch.zeros(2, tokens, HKV, D, dtype=torch.bfloat16)
    tables = (torch.zeros(batch, columns, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))
    starts = torch.zeros(batch + 1, dtype=torch.int32) if packed else None
    slots = torch.arange(tokens)
    both = caches()
    _triton.write_kv(*new, *both, slots)
    _triton.paged_attention(query, *both, *tables, starts, **OPTIONS)
    _triton.paged_attention_append(query, *new, *both, slots, *tables, starts, **OPTIONS)


def test_no_step_within_the_settings_compiles(driver: FakeDriver) -> None:
    assert warm() == len(driver.compiled)
    assert not driver.started
    assert {"attention_kernel", "combine_kernel", "write_kernel"} <= set(driver.compiled)
    known = len(driver.compiled)
    for columns in (1, 16, 17, 33, COLUMNS):
        for batch in (1, 2, 3, 31, 33, BATCH):
            step(batch, batch, columns, packed=False)
            for tokens in (1, 7, 15, 16, 33, 100, 299, TOKENS):
                step(batch, tokens, columns, packed=True)
    assert driver.compiled[known:] == []
    assert driver.started


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_first_call_inside_a_capture_says_what_to_call_before(driver: FakeDriver, capturing: None) -> None:
    message = r"write_kernel: must be compiled before a CUDA graph is captured, .*call pagedkv_ops.warm_up"
    with pytest.raises(RuntimeError, match=message):
        step(3, 3, COLUMNS, packed=False)
    assert not driver.compiled
    assert not driver.started


def test_a_capture_takes_kernels_that_are_warm(
    driver: FakeDriver, capturing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outside:
        outside.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        warm()
    known = len(driver.compiled)
    step(3, 3, COLUMNS, packed=False)
    step(3, 50, COLUMNS, packed=True)
    assert len(driver.compiled) == known
    with pytest.raises(RuntimeError, match="attention_kernel: must be compiled"):
        _triton.paged_attention(
            torch.zeros(2, HQ, D), *caches(), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        )
    step(4, 4, COLUMNS, packed=False)  # the refusal is gone with the call


def test_settings_that_no_step_has_are_refused() -> None:
    sizes = {"num_heads": HQ, "max_batch": 1, "max_tokens": 1, "max_blocks": 1}
    for name in ("max_batch", "max_tokens", "max_blocks"):
        with pytest.raises(RuntimeError, match=f"warm_up: {name} must be at least 1, got 0"):
            pagedkv_ops.warm_up(*caches(), **sizes | {name: 0})


def test_what_attention_refuses_is_refused_on_cpu_too() -> None:
    sizes = {"max_batch": 1, "max_tokens": 1, "max_blocks": 1}
    with pytest.raises(RuntimeError, match=r"^warm_up: query.size\(1\) must be a multiple of 2"):
        pagedkv_ops.warm_up(*caches(), num_heads=3, **sizes)
    with pytest.raises(TypeError, match="foo"):
        pagedkv_ops.warm_up(*caches(), num_heads=4, foo=1, **sizes)
