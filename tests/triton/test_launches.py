"""What the launchers hand to the device: the same grids and arguments whatever the index tensors hold.

A captured CUDA graph replays exactly these, so that it serves every length. Nothing is launched here; on fake CUDA
tensors a launcher that read a length on the host would raise.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import pagedkv_ops

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

from pagedkv_ops import _triton, value_checks
from pagedkv_ops._triton import config
from pagedkv_ops._triton.attention_kernel import attention_kernel
from pagedkv_ops._triton.launch import recording

B, W, T, HQ, HKV, D, N, S = 3, 40, 17, 8, 2, 64, 128, 16


def index_tensors(seed: int) -> dict[str, Tensor]:
    """Other lengths, boundaries, tables, slots and mappings for every seed; the shapes are the same."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "block_table": torch.randint(0, N, (B, W), generator=rng),
        "seq_lens": torch.randint(0, W * S, (B,), generator=rng),
        "cu_seqlens_q": torch.tensor([0, *torch.randint(0, T + 1, (B,), generator=rng).sort().values.tolist()]),
        "slot_mapping": torch.randperm(N * S, generator=rng)[:T],
        "block_mapping": torch.randperm(N, generator=rng)[:8].view(4, 2),
    }


REAL = {seed: index_tensors(seed) for seed in (1, 2)}


def fake_index_tensors() -> dict[str, Tensor]:
    """Under FakeTensorMode: the same shapes on a GPU that is not there."""
    return {name: torch.empty(value.shape, dtype=value.dtype, device="cuda:0") for name, value in REAL[1].items()}


def calls(index: dict[str, Tensor], device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """Every op that launches, on arguments of fixed shapes."""
    key_cache, value_cache = torch.zeros(2, N, S, HKV, D, dtype=torch.bfloat16, device=device)
    query = torch.zeros(T, HQ, D, dtype=torch.bfloat16, device=device)
    new = torch.zeros(T, HKV, D, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(T, HQ, device=device)
    table, seq_lens, cu_seqlens_q = index["block_table"], index["seq_lens"], index["cu_seqlens_q"]
    slots = index["slot_mapping"]
    decode = (query.narrow(0, 0, B), key_cache, value_cache, table, seq_lens)
    written = (new.narrow(0, 0, B), new.narrow(0, 0, B), key_cache, value_cache, slots.narrow(0, 0, B))
    packed = (query, key_cache, value_cache, table, seq_lens, cu_seqlens_q)
    return {
        "write": lambda: _triton.write_kv(new, new, key_cache, value_cache, slots),
        "decode": lambda: _triton.paged_attention(*decode),
        "decode, one split": lambda: _triton.paged_attention(*decode, num_splits=1),
        "decode, lse, window": lambda: _triton.paged_attention_with_lse(
            *decode, window_left=9, softcap=2.0, num_splits=7
        ),
        "packed": lambda: _triton.paged_attention(*packed),
        "packed, lse": lambda: _triton.paged_attention_with_lse(*packed, causal=False, window_right=3),
        "append": lambda: _triton.paged_attention_append(query, new, new, key_cache, value_cache, slots, *packed[3:]),
        "append, decode": lambda: _triton.paged_attention_append(decode[0], *written, *decode[3:]),
        "append, decode, one split": lambda: _triton.paged_attention_append(
            decode[0], *written, *decode[3:], num_splits=1
        ),
        "merge": lambda: _triton.merge_states(query, lse, query, lse),
        "copy": lambda: _triton.copy_blocks([key_cache, value_cache], index["block_mapping"]),
        "gather": lambda: _triton.gather_kv(key_cache, table, seq_lens, 100),
    }


def described(value: Any) -> Any:
    """Of a tensor all that a launch may depend on, but for its address."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(described, value)) if isinstance(value, tuple) else value


def launches(call: Callable[[], Any]) -> list[Any]:
    with recording() as recorded:
        call()
    assert recorded, "nothing was launched"
    return [(r.kernel.__name__, r.grid, tuple(map(described, r.args)), r.meta) for r in recorded]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "_device", lambda index: ("sm_90", 132))
    monkeypatch.setattr(value_checks, "shares_elements", lambda a, b: False)  # fake tensors have no address
    with FakeTensorMode(), torch.no_grad():
        yield


NAMES = list(calls(REAL[1]))


@pytest.mark.parametrize("name", NAMES)
def test_launches_do_not_depend_on_what_index_tensors_hold(name: str) -> None:
    first, second = (launches(calls(index)[name]) for index in REAL.values())
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_launches_set_the_fusion_of_floating_point_operations(name: str) -> None:
    with recording() as recorded:
        calls(REAL[1])[name]()
    assert recorded
    assert all(each.meta["enable_fp_fusion"] for each in recorded)


@pytest.mark.parametrize("name", NAMES)
def test_launchers_read_nothing_on_the_host(fake_cuda: None, name: str) -> None:
    assert launches(calls(fake_index_tensors(), "cuda:0")[name])


@pytest.mark.parametrize("hip", [None, "6.4"])
@pytest.mark.parametrize("name", ["decode", "append", "append, decode"])
def test_attention_names_the_device_that_it_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None
) -> None:
    """sm_75 and AMD, at the first call and before anything is written."""
    properties = SimpleNamespace(major=7, minor=5, name="Tesla T4", gcnArchName="gfx942", multi_processor_count=40)
    if hip:
        properties = SimpleNamespace(**vars(properties) | {"major": 9, "minor": 4, "name": "MI300X"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(value_checks, "shares_elements", lambda a, b: False)
    config._device.cache_clear()
    got = r"AMD gfx942 \(MI300X\)" if hip else r"compute capability 7.5 \(Tesla T4\)"
    message = f"attention needs an NVIDIA GPU of compute capability 8.0 or higher, got {got}"
    with FakeTensorMode(), torch.no_grad(), recording() as recorded, pytest.raises(NotImplementedError, match=message):
        calls(fake_index_tensors(), "cuda:0")[name]()
    assert not recorded


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("append", ["write_kernel", *["attention_kernel", "combine_kernel"] * 2]),  # chunks, then decode rows
        ("append, decode", ["attention_kernel", "combine_kernel"]),
        ("append, decode, one split", ["write_kernel", "attention_kernel"]),
    ],
)
def test_a_decode_step_is_written_by_the_attention_launch(name: str, kernels: list[str]) -> None:
    recorded = launches(calls(REAL[1])[name])
    assert [kernel for kernel, *_ in recorded] == kernels
    args = next(args for kernel, _, args, _ in recorded if kernel == "attention_kernel")
    assert (args[attention_kernel.arg_names.index("new")] is not None) == ("write_kernel" not in kernels)


def test_more_tokens_than_programs_compare_are_written_before() -> None:
    index = {name: REAL[1][name][:1].expand(129, *REAL[1][name].shape[1:]) for name in ("block_table", "seq_lens")}
    caches, new = torch.zeros(2, N, S, HKV, D), torch.zeros(129, HKV, D)
    query, slots = torch.zeros(129, HQ, D), torch.arange(129)

    def kernels(batch: int) -> list[str]:
        args = (*(x[:batch] for x in (query, new, new)), *caches, slots[:batch], *(x[:batch] for x in index.values()))
        return [kernel for kernel, *_ in launches(lambda: _triton.paged_attention_append(*args))]

    assert kernels(128) == ["attention_kernel", "combine_kernel"]
    assert kernels(129) == ["write_kernel", "attention_kernel", "combine_kernel"]


def test_a_reader_of_lengths_would_be_caught(fake_cuda: None) -> None:
    with pytest.raises(DataDependentOutputException):
        fake_index_tensors()["seq_lens"].max().item()


def test_splits_follow_shapes(fake_cuda: None) -> None:
    """A single long sequence fills the device, each of several has two shares or more, short tables have none.

    Whole waves of the eight programs that each of 132 multiprocessors runs at once.
    """

    def grid(batch: int, columns: int) -> tuple[int, ...]:
        caches = torch.empty(2, N, S, HKV, D, dtype=torch.bfloat16, device="cuda:0")
        table = torch.empty(batch, columns, dtype=torch.int32, device="cuda:0")
        query = torch.empty(batch, HQ, D, dtype=torch.bfloat16, device="cuda:0")
        seq_lens = torch.empty(batch, dtype=torch.int32, device="cuda:0")
        call = launches(lambda: _triton.paged_attention(query, *caches, table, seq_lens))
        return call[0][1]

    assert grid(1, 8192) == (config.MAX_SPLITS, HKV, 1)
    assert grid(8, 8192) == (132 * 8 // HKV, HKV, 1)
    assert grid(264, 8192) == (2 * 264, HKV, 1)
    assert grid(300, 8192) == (2 * 132 * 8 // HKV, HKV, 1)
    assert grid(4096, 8192) == (16 * 132 * 8 // HKV, HKV, 1)
    assert grid(4097, 8192) == (4097, HKV, 1)  # more than a program sees at once
    assert grid(1, 16) == (1, HKV, 1)
    assert grid(1, 64) == (4, HKV, 1)


def test_decode_rows_beside_chunks_have_a_launch_of_their_own() -> None:
    with recording() as recorded:
        calls(REAL[1])["packed"]()
    chunks, rows = (each for each in recorded if each.kernel is attention_kernel)
    assert (chunks.meta["SPEC"].ROWS, rows.meta["SPEC"].ROWS) == (2, 1)
    assert chunks.meta["SPEC"].TILE_TOKENS > rows.meta["SPEC"].TILE_TOKENS == 1
    assert rows.meta["SPEC"].SHARES
    assert rows.grid[0] > B  # programs that its sequences share, not one for each


def test_splits_are_joined_by_a_dependent_launch_on_sm_90(fake_cuda: None) -> None:
    with recording() as recorded:
        calls(fake_index_tensors(), "cuda:0")["decode"]()
    attention, combine = recorded
    assert attention.meta["SPEC"].DEPENDENT
    assert combine.meta["DEPENDENT"]
    assert combine.meta["launch_pdl"]


def test_no_launch_is_dependent_elsewhere() -> None:
    with recording() as recorded:  # the interpreter counts as sm_80
        calls(REAL[1])["decode"]()
    attention, combine = recorded
    assert not attention.meta["SPEC"].DEPENDENT
    assert "launch_pdl" not in combine.meta


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [
        (255, 1 << 10, 4, 2),  # 64K registers
        (128, 1 << 10, 4, 4),
        (32, 1 << 10, 4, 16),  # 64 warps
        (128, 72704, 4, 3),  # 228 KB
        (128, 200 << 10, 4, 1),
        (168, 72704, 8, 1),
    ],
)
def test_programs_at_once_follow_registers_and_shared_memory(
    registers: int, shared: int, warps: int, blocks: int
) -> None:
    assert config.resident("sm_90", 132, registers, shared, warps) == 132 * blocks


def test_empty_inputs_launch_nothing(fake_cuda: None) -> None:
    caches = torch.empty(2, N, S, HKV, D, device="cuda:0")
    empty = torch.empty(0, dtype=torch.int64, device="cuda:0")
    with recording() as recorded:
        out = _triton.paged_attention(caches.new_empty(0, HQ, D), *caches, empty.view(0, 4), empty)
        assert out.shape == (0, HQ, D)
        _triton.write_kv(caches.new_empty(0, HKV, D), caches.new_empty(0, HKV, D), *caches, empty)
        _triton.copy_blocks(list(caches.unbind(0)), empty.view(0, 2))
        assert _triton.gather_kv(caches.select(0, 0), empty.view(0, 4), empty, 8).shape == (0, 8, HKV, D)
    assert not recorded


def decoder_step(hidden: Tensor, pools: list[Tensor], index: dict[str, Tensor]) -> Tensor:
    """Two layers that append and attend, as a model would."""
    for pool in pools:
        key_cache, value_cache = pool.unbind(0)
        new = hidden.narrow(1, 0, HKV)
        pagedkv_ops.write_kv(new, new, key_cache, value_cache, index["slot_mapping"])
        hidden = hidden + pagedkv_ops.paged_attention(
            hidden, key_cache, value_cache, index["block_table"], index["seq_lens"], index["cu_seqlens_q"]
        )
    return hidden


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_step_traces_on_fake_cuda_tensors(symbolic: bool) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        index = fake_index_tensors()
        hidden = torch.empty(T, HQ, D, dtype=torch.bfloat16, device="cuda:0")
        pools = [torch.empty(2, N, S, HKV, D, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)]
        mode = "symbolic" if symbolic else "fake"
        graph = make_fx(decoder_step, tracing_mode=mode)(hidden, pools, index)
    ops = [node.target for node in graph.graph.nodes if "pagedkv" in str(node.target)]
    assert [op._schema.name for op in ops] == ["pagedkv::write_kv", "pagedkv::paged_attention"] * 2
    (result,) = (node.meta["val"] for node in graph.graph.output_node().all_input_nodes)
    assert result.device == torch.device("cuda:0")
    assert result.shape == (T, HQ, D)
    assert result.dtype == torch.bfloat16


def attend_only(hidden: Tensor, pools: list[Tensor], index: dict[str, Tensor]) -> Tensor:
    key_cache, value_cache = pools[0].unbind(0)
    return pagedkv_ops.paged_attention(
        hidden, key_cache, value_cache, index["block_table"], index["seq_lens"], index["cu_seqlens_q"]
    )


@pytest.mark.parametrize(("step", "backend"), [(decoder_step, "eager"), (attend_only, "aot_eager")])
def test_a_step_compiles_on_fake_cuda_tensors(step: Callable[..., Tensor], backend: str) -> None:
    """One graph. A CPU build of torch can neither functionalise a write to a CUDA tensor nor run Inductor on it."""
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        index = fake_index_tensors()
        hidden = torch.empty(T, HQ, D, dtype=torch.bfloat16, device="cuda:0")
        pools = [torch.empty(2, N, S, HKV, D, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)]
        out = torch.compile(step, fullgraph=True, backend=backend)(hidden, pools, index)
    assert out.device == torch.device("cuda:0")
    assert out.shape == (T, HQ, D)


@pytest.mark.parametrize(
    ("value", "capturing", "checks"), [("1", False, True), ("1", True, False), ("0", False, False)]
)
def test_checks_are_off_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, value: str, capturing: bool, checks: bool
) -> None:
    monkeypatch.setenv("PAGEDKV_CHECK", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    key_cache, value_cache = torch.zeros(2, N, S, HKV, D)
    new = torch.zeros(2, HKV, D)
    with recording() as recorded:
        if checks:
            with pytest.raises(RuntimeError, match=r"slot_mapping\[1\] must be below"):
                _triton.write_kv(new, new, key_cache, value_cache, torch.tensor([0, N * S]))
        else:
            _triton.write_kv(new, new, key_cache, value_cache, torch.tensor([0, N * S]))
    assert len(recorded) == (0 if checks else 1)


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, pagedkv_ops; pagedkv_ops.backends(); sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
