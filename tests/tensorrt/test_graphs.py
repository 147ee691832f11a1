"""Graphs other than a decoder: writes alone, views of one pool, reads before writes, copies, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pagedkv_ops
from pagedkv.integrations.torch_tensorrt import UnsafePagedGraphError

from .compiling import compile_error, export_and_compile, torch_compile

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE = 5, 4, 2, 16
CACHE_SHAPE = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
Function = Callable[..., Any]
BOTH_PATHS = pytest.mark.parametrize("path", ["export", "compile"])
PARTITIONERS = pytest.mark.parametrize("fast", [False, True], ids=["global", "fast"])


class Call(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def new_tokens(step: int) -> tuple[Tensor, ...]:
    """query, key, value of two tokens, their slots, one in each of two sequences, and the block table."""
    torch.manual_seed(step)
    query = torch.randn(2, 2 * NUM_KV_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, 2, NUM_KV_HEADS, HEAD_SIZE)
    return query, key, value, torch.tensor([BLOCK_SIZE + step, 2 * BLOCK_SIZE + step]), torch.tensor([[1], [2]])


def compiled_step(path: str, function: Function, args: tuple[Any, ...], fast: bool = False) -> Any:
    if path == "export":
        return export_and_compile(Call(function), args, use_fast_partitioner=fast)
    return torch_compile(Call(function), use_fast_partitioner=fast)


def check_three_steps(
    path: str, function: Function, pools: Callable[[], tuple[Tensor, ...]], fast: bool = False
) -> Any:
    """Outputs and pools of three compiled steps equal eager ones, and so do the bytes in the caller's own tensors."""
    step = compiled_step(path, function, (*pools(), *new_tokens(0)), fast)
    actual, wanted = pools(), pools()
    for i in range(3):
        out, expected = step(*actual, *new_tokens(i)), function(*wanted, *new_tokens(i))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)
    assert any(pool.any() for pool in actual)
    return step


def separate() -> tuple[Tensor, ...]:
    return torch.zeros(CACHE_SHAPE), torch.zeros(CACHE_SHAPE)


def write_only(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
) -> None:
    pagedkv_ops.write_kv(key * 2, value + 1, key_cache, value_cache, slots)


def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    seq_lens = slots % BLOCK_SIZE + 1
    return pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens, num_splits=1)


def write_then_attend(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
) -> Tensor:
    pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
    return attend(query, key_cache, value_cache, slots, table)


@BOTH_PATHS
@PARTITIONERS
def test_write_only(installed: None, path: str, fast: bool) -> None:
    check_three_steps(path, write_only, separate, fast)


@BOTH_PATHS
@PARTITIONERS
def test_last_write_has_no_reader(installed: None, path: str, fast: bool) -> None:
    def function(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
    ) -> Tensor:
        out = write_then_attend(key_cache, value_cache, query, key, value, slots, table)
        pagedkv_ops.write_kv(out[:, ::2] * 2, value, key_cache, value_cache, slots)
        return out + 1

    check_three_steps(path, function, separate, fast)


@BOTH_PATHS
@PARTITIONERS
def test_old_content_is_read_before_an_unrelated_write(installed: None, path: str, fast: bool) -> None:
    """Nothing but the order of the lines says that the attention comes first."""

    def function(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        before = attend(query, key_cache, value_cache, slots, table)
        snapshot = key_cache.sum(0) * 1
        pagedkv_ops.write_kv(key * 2, value, key_cache, value_cache, slots)
        return before * 2 + attend(query, key_cache, value_cache, slots, table), snapshot

    check_three_steps(path, function, separate, fast)


@BOTH_PATHS
@pytest.mark.parametrize("clone", [Tensor.clone, torch.clone, torch.ops.aten.clone.default])
def test_a_clone_of_the_models_own_stays_a_clone(installed: None, path: str, clone: Function) -> None:
    def function(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
    ) -> Tensor:
        before = clone(value_cache)
        scratch = clone(key_cache)
        pagedkv_ops.write_kv(key * 2, value, scratch, value_cache, slots)
        return attend(query, scratch, value_cache, slots, table) + attend(query, scratch, before, slots, table)

    check_three_steps(path, function, separate)


@BOTH_PATHS
def test_copied_blocks_are_kept(installed: None, path: str) -> None:
    def function(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
    ) -> Tensor:
        out = write_then_attend(key_cache, value_cache, query, key, value, slots, table)
        pagedkv_ops.copy_blocks([key_cache, value_cache], torch.tensor([[1, 3], [2, 4]]))
        return out + attend(query, key_cache, value_cache, slots, table)

    check_three_steps(path, function, separate)


def _stacked() -> tuple[Tensor, ...]:
    return (torch.zeros(2, *CACHE_SHAPE),)


def _flat() -> tuple[Tensor, ...]:
    return (torch.zeros(2 * NUM_BLOCKS, *CACHE_SHAPE[1:]),)


VIEWS: dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[[Tensor], Any]]] = {
    "index": (_stacked, lambda pool: (pool[0], pool[1])),
    "unbind": (_stacked, lambda pool: pool.unbind(0)),
    "view": (_flat, lambda pool: pool.view(2, *CACHE_SHAPE)),
    "reshape": (_flat, lambda pool: pool.reshape(2, *CACHE_SHAPE)),
    "interleaved": (_stacked, lambda pool: pool.view(NUM_BLOCKS, 2, *CACHE_SHAPE[1:]).unbind(1)),
}


@BOTH_PATHS
@PARTITIONERS
@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_one_pool_inside_the_graph(installed: None, path: str, fast: bool, kind: str) -> None:
    pools, take_views = VIEWS[kind]

    def function(pool: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        key_cache, value_cache = take_views(pool)
        return write_then_attend(key_cache, value_cache, query, key, value, slots, table) * 2

    step = check_three_steps(path, function, pools, fast)
    if path == "export":
        engines = [sub for name, sub in step.named_children() if "_run_on_acc" in name]
        copied = [node for sub in engines for node in sub.graph.nodes if node.op == "placeholder"]
        assert all(node.meta["val"].numel() < pools()[0].numel() for node in copied), "an engine copies the pool"


@BOTH_PATHS
def test_a_cache_that_other_ops_write_too_is_refused(installed: None, path: str) -> None:
    def function(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, table: Tensor
    ) -> Tensor:
        out = write_then_attend(key_cache, value_cache, query, key * 2, value, slots, table)
        key_cache.mul_(0.5)
        return out

    args = (*separate(), *new_tokens(0))
    step = (
        torch_compile(Call(function)) if path == "compile" else lambda *args: export_and_compile(Call(function), args)
    )
    assert "by something else in one graph" in str(compile_error(step, args))


@PARTITIONERS
def test_full_compilation_is_refused_with_the_ops_in_the_way(installed: None, fast: bool) -> None:
    options = {"require_full_compilation": True, "use_fast_partitioner": fast}
    with pytest.raises(UnsafePagedGraphError) as caught:
        export_and_compile(Call(write_then_attend), (*separate(), *new_tokens(0)), **options)
    ops = "pagedkv.paged_attention.default, pagedkv.write_kv.default"
    assert f"require_full_compilation=True can not hold: {ops} run in PyTorch" in str(caught.value)


def test_paged_ops_stay_out_of_engines(installed: None) -> None:
    step = compiled_step("export", write_then_attend, (*separate(), *new_tokens(0)), fast=True)
    engines = {name: sub for name, sub in step.named_children() if "_run_on_acc" in name}
    assert engines, "nothing was lowered: the partition shows nothing"
    for sub in engines.values():
        assert not [node for node in sub.graph.nodes if "pagedkv" in str(node.target)]


def test_a_failed_conversion_still_writes(installed: None, caplog: pytest.LogCaptureFixture) -> None:
    """The backend then runs the graph it was handed, which has a clone behind every input by then."""
    from torch_tensorrt.dynamo.lowering.passes._aten_lowering_pass import ATEN_POST_LOWERING_PASSES

    def failing_pass(gm: Any, settings: Any) -> Any:
        raise RuntimeError("a conversion that fails")

    ATEN_POST_LOWERING_PASSES.passes.append(failing_pass)
    try:
        with caplog.at_level(logging.WARNING, logger="torch_tensorrt"):
            check_three_steps("compile", write_then_attend, separate)
    finally:
        ATEN_POST_LOWERING_PASSES.passes.remove(failing_pass)
    assert "a conversion that fails" in caplog.text
