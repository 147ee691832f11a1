"""Caches that are views of one pool, made outside the graph: kept apart, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pagedkv_ops

from .compiling import compile_error, export_and_compile, torch_compile
from .test_graphs import BOTH_PATHS, CACHE_SHAPE, NUM_BLOCKS, Call, attend, check_three_steps, new_tokens

PATHS = pytest.mark.parametrize("path", ["export", "strict_export", "compile"])
Caches = tuple[Tensor, ...]


def layers(*arguments: Tensor) -> Tensor:
    """One layer for each two caches, which come first; each writes, attends and hands on what it found."""
    *caches, query, key, value, slots, table = arguments
    for i in range(0, len(caches), 2):
        pagedkv_ops.write_kv(key * 2, value, caches[i], caches[i + 1], slots)
        key = attend(query, caches[i], caches[i + 1], slots, table)[:, ::2]
    return key * 2


def reads_the_pool(key_cache: Tensor, value_cache: Tensor, pool: Tensor, *tokens: Tensor) -> Tensor:
    query, key, value, slots, table = tokens
    pagedkv_ops.write_kv(key * 2, value, key_cache, value_cache, slots)
    return attend(query, pool[0], pool[1], slots, table)


def pool_of(num_caches: int) -> Tensor:
    return torch.zeros(num_caches, *CACHE_SHAPE)


def interleaved() -> Caches:
    return torch.zeros(NUM_BLOCKS, 2, *CACHE_SHAPE[1:]).unbind(1)


@BOTH_PATHS
@pytest.mark.parametrize("num_layers", [1, 3])
def test_disjoint_views(installed: None, path: str, num_layers: int) -> None:
    check_three_steps(path, layers, lambda: pool_of(2 * num_layers).unbind(0))


def test_interleaved_views(installed: None) -> None:
    check_three_steps("compile", layers, interleaved)


def _pool_beside_its_views() -> Caches:
    pool = pool_of(2)
    return pool[0], pool[1], pool


def _one_cache_for_both() -> Caches:
    cache = pool_of(1)[0]
    return cache, cache


def _second_layer_on_the_first() -> Caches:
    pool = pool_of(4)
    return pool[0], pool[1], pool[2], pool[1]


def _neighbours_that_overlap() -> Caches:
    pool = torch.zeros(4 * NUM_BLOCKS, *CACHE_SHAPE[1:])
    return tuple(pool[i * (NUM_BLOCKS - 1) :][:NUM_BLOCKS] for i in range(4))


OVERLAPS: dict[str, tuple[Callable[..., Tensor], Callable[[], Caches]]] = {
    "pool beside its views": (reads_the_pool, _pool_beside_its_views),
    "one cache for both": (layers, _one_cache_for_both),
    "second layer on the first": (layers, _second_layer_on_the_first),
    "neighbours that overlap": (layers, _neighbours_that_overlap),
}


def compile_and_call(path: str, model: nn.Module, args: tuple[Any, ...]) -> None:
    if path == "compile":
        torch_compile(model)(*args)
    else:
        export_and_compile(model, args, strict=path == "strict_export")


@PATHS
@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_inputs_are_refused(installed: None, path: str, kind: str) -> None:
    if (path, kind) == ("compile", "one cache for both"):
        with pytest.raises(RuntimeError, match="write_kv: key_cache and value_cache must not share elements"):
            torch_compile(Call(layers))(*_one_cache_for_both(), *new_tokens(0))  # one input: the op sees it
        return
    function, make = OVERLAPS[kind]
    caches = make()
    args = (*caches, *new_tokens(0))
    error = compile_error(lambda *args: compile_and_call(path, Call(function), args), args)
    assert "are views of one pool that overlap" in str(error)
    assert not any(cache.any() for cache in caches)


class Buffers(nn.Module):
    def __init__(self, function: Callable[..., Tensor], caches: Caches) -> None:
        super().__init__()
        self.function = function
        self.names = [f"cache_{i}" for i in range(len(caches))]
        for name, cache in zip(self.names, caches, strict=True):
            self.register_buffer(name, cache)

    def forward(self, *tokens: Tensor) -> Tensor:
        return self.function(*(getattr(self, name) for name in self.names), *tokens)


@PATHS
@pytest.mark.parametrize("kind", ["pool beside its views", "second layer on the first"])
def test_overlapping_buffers_are_refused(installed: None, path: str, kind: str) -> None:
    function, make = OVERLAPS[kind]
    model = Buffers(function, make())
    error = compile_error(lambda *args: compile_and_call(path, model, args), new_tokens(0))
    assert "are views of one pool that overlap" in str(error)
    assert not any(cache.any() for cache in model.buffers())


@pytest.mark.parametrize("strict", [False, True])
def test_interleaved_buffers_are_refused_where_decompositions_would_fail(installed: None, strict: bool) -> None:
    model = Buffers(layers, interleaved())
    error = compile_error(lambda *args: export_and_compile(model, args, strict=strict), new_tokens(0))
    assert "b_cache_0 and b_cache_1 are views of one pool that overlap or interleave" in str(error)


def test_views_that_only_readers_share_are_no_reason_to_refuse(installed: None) -> None:
    """Two inputs over one pool, of which only a copy is written."""

    def function(pool: Tensor, again: Tensor, *tokens: Tensor) -> Tensor:
        query, key, value, slots, table = tokens
        key_cache, value_cache = pool[0].clone(), again[1].clone()
        pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
        return attend(query, key_cache, value_cache, slots, table)

    pool = torch.randn(2, *CACHE_SHAPE)
    args = (pool, pool.view(pool.shape), *new_tokens(0))
    step = export_and_compile(Call(function), args)
    torch.testing.assert_close(step(*args), function(*args))
