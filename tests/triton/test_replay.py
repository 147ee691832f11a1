"""Calls of a known kind, with the driver faked: the right launches without another check, plan or look-up by Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

import triton
from triton.runtime import _allocation

from benchmarks.bench_host import calls, python_work
from pagedkv_ops import _triton
from pagedkv_ops._triton import launch, replay, tuned
from pagedkv_ops._triton.replay import forget
from tools.fake_driver import FakeDriver

B, HQ, HKV, D, S, N, W = 3, 4, 2, 32, 16, 12, 4


@pytest.mark.parametrize(
    ("name", "functions", "blocks"),
    [
        ("attention", 17, 90),
        ("attention, split", 20, 85),
        ("attention, mixed", 26, 95),
        ("append", 17, 90),
        ("append, split", 20, 100),
        ("write", 17, 70),
        ("copy of 8 caches", 21, 115),
    ],
)
def test_a_call_of_a_known_kind_does_little_in_python(
    driver: FakeDriver, name: str, functions: int, blocks: int
) -> None:
    """Counts, as times depend on the machine: 270 to 480 Python functions before, see ``benchmarks/bench_host.py``."""
    function = calls()[name]
    function()
    driver.started = None
    entered, held = python_work(function)
    assert entered <= functions
    assert held <= blocks


def arguments(**changes: Any) -> dict[str, Any]:
    """Of every op below, each tensor in an allocation of its own."""
    values: dict[str, Any] = {
        "query": torch.zeros(B, HQ, D, dtype=torch.float16),
        "key": torch.zeros(B, HKV, D, dtype=torch.float16),
        "value": torch.zeros(B, HKV, D, dtype=torch.float16),
        "key_cache": torch.zeros(N, S, HKV, D, dtype=torch.float16),
        "value_cache": torch.zeros(N, S, HKV, D, dtype=torch.float16),
        "slot_mapping": torch.arange(B),
        "block_table": torch.zeros(B, W, dtype=torch.int32),
        "seq_lens": torch.ones(B, dtype=torch.int32),
        "cu_seqlens_q": None,
        "options": {},
    }
    return values | changes


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """Equal in all but the address, which is no longer a multiple of 16."""
    return tensor.new_zeros(tensor.numel() + elements)[elements:].view(tensor.shape)


def wide(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Rows further apart."""
    return tensor.new_zeros(*tensor.shape[:-1], tensor.size(-1) + by)[..., : tensor.size(-1)]


def interleaved(distance: int) -> dict[str, torch.Tensor]:
    """K and V in one storage; at distance 1 slot of K they share no element, at 0 they are the same."""
    pool = torch.zeros(N, S, 2, HKV, D, dtype=torch.float16)
    return {"key_cache": pool[:, :, 0], "value_cache": pool[:, :, distance]}


def near_misses() -> dict[str, dict[str, Any]]:
    """Each differs from ``arguments()``, or the one before it, in one thing that decides the kernel or an error."""
    a = arguments()
    half = torch.zeros(N, S, HKV, 2 * D, dtype=torch.float16)
    same_cache = a["key_cache"]
    return {
        "plain": a,
        "again, elsewhere": arguments(),
        "query not aligned": a | {"query": shifted(a["query"])},
        "key cache not aligned": a | {"key_cache": shifted(a["key_cache"])},
        "query strides not divisible by 16": a | {"query": wide(a["query"], 4)},
        "query strides divisible by 16": a | {"query": wide(a["query"], 16)},
        "key strides not divisible by 16": a | {"key": wide(a["key"], 4)},
        "indices of 64 bits": a | {"seq_lens": a["seq_lens"].long()},
        "table of 64 bits": a | {"block_table": a["block_table"].long()},
        "slots of 32 bits": a | {"slot_mapping": a["slot_mapping"].int()},
        "slots not contiguous": a | {"slot_mapping": torch.arange(2 * B)[::2]},
        "lengths not contiguous": a | {"seq_lens": torch.ones(2 * B, dtype=torch.int32)[::2]},
        "table of another column stride": a | {"block_table": torch.zeros(B, 2 * W, dtype=torch.int32)[:, ::2]},
        "fewer slots": a | {"slot_mapping": torch.arange(B - 1)},
        "bfloat16 query": a | {"query": a["query"].bfloat16()},
        "float32 tokens": a | {"key": a["key"].float(), "value": a["value"].float()},
        "one more column": a | {"block_table": torch.zeros(B, W + 1, dtype=torch.int32)},
        "many columns": a | {"block_table": torch.zeros(B, 300, dtype=torch.int32)},
        "fewer blocks": a | {"key_cache": a["key_cache"][1:], "value_cache": a["value_cache"][1:]},
        "packed": a | {"cu_seqlens_q": torch.tensor([0, 1, 2, 3])},
        "window": a | {"options": {"window_left": 3}},
        "another window": a | {"options": {"window_left": 4}},
        "right window": a | {"options": {"window_right": 3, "causal": False}},
        "scale": a | {"options": {"scale": 0.5}},
        "softcap": a | {"options": {"softcap": 5.0}},
        "large softcap": a | {"options": {"softcap": 500.0}},
        "one split": a | {"options": {"num_splits": 1}},
        "three splits": a | {"options": {"num_splits": 3}},
        "sinks": a | {"options": {"sinks": torch.zeros(HQ)}},
        "ALiBi": a | {"options": {"alibi_slopes": torch.zeros(HQ)}},
        "interleaved caches": a | interleaved(1),
        "interleaved again": a | interleaved(1),
        "caches that share elements": a | interleaved(0),
        "the same cache twice": a | {"key_cache": same_cache, "value_cache": same_cache},
        "halves of a cache": a | {"key_cache": half[..., :D], "value_cache": half[..., D:]},
        "tokens in the cache": a | {"key": a["key_cache"][2, :B], "value": a["value_cache"][2, :B]},
        "other caches": arguments(),
        "query in the cache": a | {"query": half.view(-1)[: B * HQ * D].view(B, HQ, D), "key_cache": half[..., :D]},
        "table on another device": a | {"block_table": a["block_table"].to("meta")},
        "query of another rank": a | {"query": a["query"][None]},
        "one token too few": a | {"query": a["query"][1:]},
        "another head size": a | {"query": wide(a["query"], 4)[..., :16]},
        "window below -1": a | {"options": {"window_left": -2}},
        "expanded cache": a | {"key_cache": a["key_cache"][:1].expand(N, -1, -1, -1)},
        "caches of two types": a | {"value_cache": a["value_cache"].float()},
        "no tokens": a | {k: a[k][:0] for k in ("query", "key", "value", "slot_mapping", "block_table", "seq_lens")},
        "no slots": a | {"slot_mapping": torch.arange(0)},
    }


def ops(a: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    caches = (a["key_cache"], a["value_cache"])
    new = (a["key"], a["value"])
    tables = (a["block_table"], a["seq_lens"], a["cu_seqlens_q"])
    options = a["options"]
    return {
        "write": lambda: _triton.write_kv(*new, *caches, a["slot_mapping"]),
        "attention": lambda: _triton.paged_attention(a["query"], *caches, *tables, **options),
        "with lse": lambda: _triton.paged_attention_with_lse(a["query"], *caches, *tables, **options),
        "append": lambda: _triton.paged_attention_append(
            a["query"], *new, *caches, a["slot_mapping"], *tables, **options
        ),
        "copy": lambda: _triton.copy_blocks(caches, torch.tensor([[0, 1]])),
        "gather": lambda: _triton.gather_kv(a["key_cache"], *tables[:2], 20),
        "merge": lambda: _triton.merge_states(a["query"], a["query"][..., 0].float(), a["query"], torch.zeros(B, HQ)),
    }


def outcome(driver: FakeDriver, call: Callable[[], Any], a: dict[str, Any]) -> Any:
    """The error, or launches and results; new allocations are known by where they first appear."""
    driver.started = []
    try:
        results = call()
    except RuntimeError as error:
        return str(error)
    inputs = {value.data_ptr(): name for name, value in (a | a["options"]).items() if isinstance(value, torch.Tensor)}
    launches = [
        each._replace(args=tuple(inputs.get(x, "new") if type(x) is int and x > 2**32 else x for x in each.args))
        for each in driver.started
    ]
    outs = results if isinstance(results, tuple) else (results,)
    return launches, [None if out is None else (out.shape, out.stride(), out.dtype) for out in outs]


@pytest.mark.parametrize("op", list(ops(arguments())))
def test_near_misses_get_what_an_op_without_memory_gives(driver: FakeDriver, op: str) -> None:
    calls = near_misses()
    memoryless = {}
    for name, a in calls.items():
        forget()
        memoryless[name] = outcome(driver, ops(a)[op], a)
    forget()
    for _ in range(3):  # the first makes the memory, in the second and third each call meets that of all others
        for name, a in calls.items():
            assert outcome(driver, ops(a)[op], a) == memoryless[name], name
    if op in ("append", "write"):
        assert "must not share elements" in memoryless["the same cache twice"]
        assert "must not share elements" in memoryless["caches that share elements"]
        assert memoryless["interleaved caches"] == memoryless["interleaved again"]


def test_a_replay_passes_on_new_addresses_and_keeps_no_tensor(driver: FakeDriver) -> None:
    import gc
    import weakref

    a, b = arguments(), arguments()
    ops(a)["append"]()
    kept = [weakref.ref(value) for value in a.values() if isinstance(value, torch.Tensor)]
    del a
    gc.collect()
    assert not any(reference() is not None for reference in kept)
    driver.started = []
    out = ops(b)["append"]()
    (start,) = driver.started
    addresses = {value.data_ptr() for value in b.values() if isinstance(value, torch.Tensor)}
    assert addresses | {out.data_ptr()} <= set(start.args)
    assert start.stream == 7


def test_results_are_new_in_every_call(driver: FakeDriver) -> None:
    call = ops(arguments())["with lse"]
    first, second, third = call(), call(), call()
    assert len({tensor.data_ptr() for pair in (first, second, third) for tensor in pair}) == 6


def test_debug_mode_checks_every_call(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    a = arguments()
    for _ in range(2):
        ops(a)["write"]()
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    bad = a | {"slot_mapping": torch.tensor([0, 1, N * S])}
    with pytest.raises(RuntimeError, match=r"slot_mapping\[2\] must be below"):
        ops(bad)["write"]()


def test_recording_sees_calls_of_a_known_kind(driver: FakeDriver) -> None:
    call = ops(arguments())["append"]
    for _ in range(2):
        call()
    driver.started = []
    with launch.recording() as recorded:
        call()
    assert [each.kernel.__name__ for each in recorded] == ["attention_kernel"]
    assert not driver.started


def test_memory_is_bounded(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_KINDS", 3)
    monkeypatch.setattr(replay, "_MOST_VARIANTS", 2)
    a = arguments()
    for window in range(8):
        ops(a | {"options": {"window_left": window}})["attention"]()
        assert len(_triton.paged_attention.kinds) <= 3
    for elements in range(1, 7):
        ops(a | {"query": shifted(a["query"], elements)})["attention"]()
    assert all(len(kind.variants) <= 2 for kind in _triton.paged_attention.kinds.values())


def test_who_changes_the_table_of_configurations_forgets_plans(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ops(arguments())["attention"]
    call()
    monkeypatch.setitem(tuned.TABLE, ("sm_80", "decode", 2, 64), (16, 32, 8, 3, 8))
    forget()
    call()
    before, after = (str(each.specialisation[-1]) for each in driver.started)
    assert "('num_warps', 4), ('num_stages', 5)" in before
    assert "('num_warps', 8), ('num_stages', 3)" in after


def test_hooks_on_launches_are_called(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay passes none where there are none; a profiler's see every launch."""
    call = ops(arguments())["write"]
    for _ in range(2):
        call()
    seen: list[Any] = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        call()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    call()
    assert seen == ["write_kernel"]
    assert len(driver.started) == 4


def test_boxes_get_memory_for_their_descriptors(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks for it at every launch, the first and those of a known kind; a user's allocator stays."""
    monkeypatch.setitem(tuned.TABLE, ("sm_80", "prefill", 2, 64), (64, 16, 4, 2, 1, True))
    sizes: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: sizes.append(size) or empty(size, **options))
    a = arguments(query=torch.zeros(200, HQ, D, dtype=torch.float16), cu_seqlens_q=torch.tensor([0, 1, 2, 200]))
    before = _allocation._allocator.get()
    for launches in (1, 2, 3):
        ops(a)["attention"]()
        assert sizes == [256] * launches
    assert _allocation._allocator.get() is before


def test_a_kernel_of_another_backend_is_launched_by_triton(driver: FakeDriver) -> None:
    driver.target = driver.target.__class__("hip", "gfx942", 64)
    call = ops(arguments())["write"]
    for _ in range(3):
        call()
    assert len(driver.started) == 3
    assert all(v is None for kind in _triton.write_kv.kinds.values() for v in kind.variants.values())


def test_launches_are_made_on_the_device_of_the_tensors(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call and its replays; the driver's current device is 0."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def enter(what: Any) -> Iterator[None]:
        entered.append(1 if isinstance(what, torch.Tensor) else what)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "device_of", enter)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    monkeypatch.setattr(driver, "get_current_stream", lambda device: 10 + device)
    write = calls()["write"]
    forget()
    write()
    assert entered == [1, "left"]
    write()
    assert entered == [1, "left"] * 2
    assert driver.started is not None
    assert driver.started[-1].stream == 11
    forget()
