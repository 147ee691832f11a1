"""What an engine does on a device that is not the CPU, seen by recording stubs in the place of CUDA."""

import contextlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import pagedkv_ops
from pagedkv import transfers
from pagedkv.block_table import BlockTable
from pagedkv.engine import sampling

from .conftest import build_llama
from .oracle import assert_native, prompts


class _Away(TorchFunctionMode):
    """Lets the CPU stand for a device: leaves out the pinning, and notes copies, waits and random numbers."""

    def __init__(self):
        super().__init__()
        self.log, self.is_strict = [], False
        self.pinned = {}  # kept, so that nothing else comes to lie there

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", None)
        is_copy = function in (Tensor.copy_, Tensor.to) and any(map(self._is_pinned, args))
        if self.is_strict:
            self._watch(function, args, kwargs, is_pinned, is_copy)
        result = function(*args, **kwargs)
        if is_pinned is not None:
            self.pinned[result.untyped_storage().data_ptr()] = result
        return result.clone() if is_copy and function is Tensor.to else result

    def _watch(self, function, args, kwargs, is_pinned, is_copy):
        if function in (torch.tensor, torch.as_tensor):
            assert is_pinned, "values that are copied from memory which is not pinned"
        if is_copy:
            assert kwargs["non_blocking"], "a copy that waits"
            self.log.append("copy")
        if function in (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__):
            assert self._is_pinned(args[0]), f"{function.__name__} waits"
        if function in (Tensor.exponential_, Tensor.uniform_, torch.rand, torch.multinomial):
            self.log.append("random")
        if function is Tensor.index_put_:
            self.log.append(f"{len(args[1][0])} entries")

    def _is_pinned(self, tensor):
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self.pinned

    @contextlib.contextmanager
    def watched(self):
        self.log.clear()
        self.is_strict = True
        yield
        self.is_strict = False

    def record_event(self):
        return SimpleNamespace(synchronize=lambda: self.log.append("wait"))


@pytest.fixture
def away(monkeypatch):
    for module in (sampling, transfers):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    with _Away() as stub:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stub)
        yield stub


def _agrees(table):
    return all(np.array_equal(sent.numpy(), getattr(table, name)) for name, sent in table.tensors.items())


def test_only_changed_entries_of_a_table_are_uploaded(away):
    table = BlockTable(3, 40, 16, 4)
    table.set_row(0, [5, 6])
    table.set_row(1, [7])
    table.fill([4, 2])
    steps = [
        (lambda: None, []),
        (lambda: table.set_entries([1], [1], [9]), ["1 entries"]),
        (lambda: table.set_row(0, [5, 6, 8]), ["1 entries"]),
        (lambda: table.append_row(0, [3, 4]), ["2 entries"]),
        (lambda: table.move_row(1, 0), ["7 entries"]),
        (lambda: table.set_row(2, range(1, 31)), ["copy"]),  # more than a step brings: the row
        (lambda: table.fill([4]), ["copy"]),  # and it is cleared
        (lambda: None, []),
    ]
    table.upload()
    for change, expected in steps:
        change()
        with away.watched():
            table.upload()
        assert sorted(away.log) == sorted(["copy", *expected])  # the first: slots, lengths, offsets
        assert _agrees(table)


def test_arrays_begin_where_kernels_are_compiled_for(llama, make_engine):
    engine = make_engine(llama, max_num_seqs=5, max_num_batched_tokens=7)
    inputs = engine.runner._buffers.views(3, 3, engine.runner._buffers.logits_at[:3], decode=False)
    tensors = [inputs.ids, inputs.positions, inputs.logits_at, *(part[0] for part in inputs.indices.values())]
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 7


def test_a_step_copies_without_waiting_and_reads_once(llama, make_engine, away):
    """Greedy, sampled, with log-probabilities and with processors of their own."""
    engine = make_engine(llama)
    options = {"max_new_tokens": 12}
    engine.add_request([1, 2, 3], **options)
    engine.add_request([4, 5, 6], **options, do_sample=True, seed=1, logprobs=2)
    engine.add_request([7, 8, 9], **options, do_sample=True, seed=2, temperature=0.5, num_return_sequences=2)
    engine.add_request([7, 8], **options, repetition_penalty=1.3, logprobs=0)
    engine.step()
    logs = []
    for _ in range(5):
        with away.watched():
            engine.step()
        logs.append(away.log.copy())
    assert all(log.count("wait") == 1 and "random" not in log for log in logs)
    assert [sum("entries" in entry for entry in log) for log in logs] == [1, 1, 1, 0, 0]  # a fork, two more blocks
    # inputs and table, three groups of settings, two of log-probabilities: rows, numbers, ids, and what comes back
    assert {log.count("copy") for log in logs[1:]} == {2 + 3 + 2 + 1 + 2 + 1 + 2 * 3}


def test_random_numbers_of_a_device_follow_from_seed_and_place(llama, make_engine, away):
    """No launch draws them, and neither neighbours nor an interrupt nor a draft changes them."""
    options = {"do_sample": True, "max_new_tokens": 20, "seed": 3}
    prompt = (prompts(1, 5, 5)[0] * 4)[:20]
    alone = make_engine(llama).generate([prompt], **options)[0].token_ids
    assert alone == make_engine(llama).generate([prompt], prompt_lookup_num_tokens=3, **options)[0].token_ids
    engine = make_engine(llama, num_blocks=30, max_num_batched_tokens=16)
    request = engine.add_request(prompt, priority=-1, **options)
    for index, other in enumerate(prompts(8, 5, 30, seed=4)):
        engine.add_request(other, max_new_tokens=15, do_sample=index % 2 == 0, seed=3, top_k=7)
    while not engine.is_idle:
        engine.step()
    result = engine.results(request)[0]
    assert (result.token_ids, result.num_preemptions > 0) == (alone, True)
    assert len({tuple(r.token_ids) for r in engine.generate([prompt] * 3, **options, num_return_sequences=2)}) == 6


def test_counted_tokens_have_their_probabilities():
    weights = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    samples = [SimpleNamespace(generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    decisions = [sampling.Decision(sample, start) for sample in samples for start in range(250)]
    drawn = sampling._counted(decisions, weights.expand(10_000, -1))
    shares = drawn.bincount(minlength=6) / 10_000
    assert shares[weights == 0].sum() == 0
    assert (shares - weights).abs().max() < 0.02  # four standard deviations
    ends = torch.tensor([0.5, 0.5, 0.0]).expand(2, -1)
    for number, token in ((0, 0), (2**53 - 1, 1)):  # never a token without a probability
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda *_, n=number: np.array([n, n], np.uint64))
            assert sampling._counted(decisions[:2], ends).tolist() == [token] * 2


def test_a_start_compiles_what_any_step_can_launch(make_engine, monkeypatch):
    calls = []
    monkeypatch.setattr(pagedkv_ops, "warm_up", lambda *caches, **options: calls.append((caches, options)))
    copies = []
    monkeypatch.setattr(pagedkv_ops, "copy_blocks", lambda caches, mapping: copies.append(mapping.tolist()))
    engine = make_engine(build_llama(num_hidden_layers=3), max_num_seqs=5, max_num_batched_tokens=30)
    [(caches, options)] = calls  # of equal layers once
    layer = engine.runner.cache.paged[0]
    assert caches == (layer.key_cache, layer.value_cache)
    sizes = {"num_heads": 4, "max_batch": 5, "max_tokens": 30, "max_blocks": engine.runner.pool.table_width}
    attention = {"scale": 8**-0.5, "window_left": -1, "softcap": 0.0, "sinks": None}
    assert options == {**sizes, "dtype": torch.float32, **attention}
    assert copies == [[[0, 0]]] * 3
    from .test_oracle import _gemma3

    calls.clear()
    make_engine(_gemma3())
    assert sorted(options["window_left"] for _, options in calls) == [-1, 6]
    calls.clear()
    engine = make_engine(build_llama(num_hidden_layers=3), kv_dtype="int8")
    [(caches, options)] = calls  # though each layer has scales of its own
    written = engine.runner.cache.paged[0].write_scales
    assert caches[0].dtype == torch.int8
    assert {name: options[name] for name in written} == written


def test_no_step_of_an_engine_compiles(make_engine, monkeypatch):
    """Through Triton's own launch path, on a driver that is not there."""
    pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")
    from pagedkv_ops import _triton, warming
    from pagedkv_ops._triton.replay import forget
    from tools.fake_driver import installed

    def warm_up(*caches, num_heads, max_batch, max_tokens, max_blocks, dtype, **options):
        warming._compile_steps(caches, num_heads, max_batch, max_tokens, max_blocks, dtype, options)

    with installed() as driver:
        forget()
        monkeypatch.setattr(pagedkv_ops, "warm_up", warm_up)
        model = build_llama(hidden_size=64, num_hidden_layers=1).to(torch.bfloat16)
        engine = make_engine(model, max_num_seqs=5, max_num_batched_tokens=30)
        known = len(driver.compiled)
        assert known > 2
        runner, layer = engine.runner, engine.runner.cache.paged[0]
        monkeypatch.setattr(pagedkv_ops, "paged_attention_append", _triton.paged_attention_append)
        for tokens, rows in ((1, 1), (2, 2), (5, 5), (3, 2), (30, 5), (17, 1)):
            wanted = None if tokens == rows else runner._buffers.logits_at[:rows]
            inputs = runner._buffers.views(tokens, rows, wanted, decode=tokens == rows)
            runner.patch.run(runner._forward, inputs)
        assert driver.compiled[known:] == []
        assert driver.started
        assert layer.key_cache.dtype == torch.bfloat16
    forget()


@pytest.fixture
def cuda_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())


def test_a_capture_that_fails_names_the_op_and_leaves_decode_eager(
    llama, make_engine, monkeypatch, cuda_graphs, caplog
):
    engine = make_engine(llama, max_num_seqs=4)
    runner, forward = engine.runner, engine.runner._forward

    def not_captured(inputs):
        if len(inputs.ids[0]) == 2:
            int(inputs.ids.sum())
            raise RuntimeError("operation not permitted when stream is capturing")
        return forward(inputs)

    monkeypatch.setattr(runner, "_forward", not_captured)
    runner._capture()  # as "auto", the default; the bucket of 4 was captured before that of 2 fails
    assert not runner._graphs
    [record] = [record for record in caplog.records if record.name == "pagedkv.engine.runner"]
    assert re.search(
        r"graphs: aten::item can not be captured, in not_captured at `raise RuntimeError\(.*`: operation",
        record.getMessage(),
    )
    monkeypatch.setattr(runner, "_forward", forward)
    assert_native(llama, engine.generate(prompts(3, 1, 20), max_new_tokens=8), max_new_tokens=8)
    runner.config.cuda_graphs = True
    monkeypatch.setattr(runner, "_forward", not_captured)
    with pytest.raises(RuntimeError, match="capturing"):
        runner._capture()


def test_forwards_copies_and_events_are_made_on_the_engines_device(llama, make_engine, monkeypatch):
    log = []

    @contextlib.contextmanager
    def device(name):
        log.append(f"enter {name}")
        yield
        log.append(f"leave {name}")

    engine = make_engine(llama)
    engine.add_request([1, 2, 3], max_new_tokens=9)
    engine.step()
    monkeypatch.setattr(torch.cuda, "device", device)
    runner, buffers, forward = engine.runner, engine.runner._buffers, engine.runner._forward
    monkeypatch.setattr(runner, "_forward", lambda inputs: log.append("forward") or forward(inputs))
    one = torch.device("cuda:1")
    event = SimpleNamespace(record=lambda: log.append("record"), synchronize=lambda: log.append("wait"))
    for part in (runner, buffers._staging, runner.tables[0], runner.tables[0]._staging):
        monkeypatch.setattr(part, "device", one)
    for staging in (buffers._staging, runner.tables[0]._staging):
        monkeypatch.setattr(staging, "_copied", event)
        monkeypatch.setattr(staging, "is_copied", True)
    engine.step()
    enter, leave = "enter cuda:1", "leave cuda:1"
    assert log == [enter, enter, "record", leave, enter, "record", leave, "forward", leave]
    log.clear()
    engine.step()
    assert log.count("wait") == 2  # before the host's side is written again
    monkeypatch.undo()


def test_captures_are_made_on_the_engines_device(llama, make_engine, monkeypatch):
    entered, captured = [], []

    @contextlib.contextmanager
    def device(name):
        entered.append(str(name))
        yield
        entered.pop()

    runner = make_engine(llama, max_num_seqs=2).runner
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool: captured.append([*entered]) or contextlib.nullcontext()
    )
    monkeypatch.setattr(runner, "device", torch.device("cuda:1"))
    runner._capture()
    assert captured == [["cuda:1"]] * 2
    monkeypatch.undo()
