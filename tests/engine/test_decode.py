"""Decode steps from static buffers: eager, compiled and captured ones agree, and nothing is compiled while serving."""

import contextlib
import functools
import io

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import pagedkv
from pagedkv_ops.testing import assert_no_cache_clone

from .conftest import build_llama
from .oracle import assert_native, prompts


@pytest.fixture(scope="module")
def small():
    """What compiles soon."""
    return build_llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def compiling(small):
    """A compiled engine, what its making has printed, and the graphs that it has made."""
    torch.set_num_threads(1)  # a compiled kernel keeps the number of threads it was compiled for
    torch._dynamo.reset()
    counters.clear()
    printed = io.StringIO()
    settings = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32, "buckets": [2, 6]}
    timed = torch._inductor.config.patch(autotune_local_cache=False)  # tables are of what is timed now
    with timed, contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        engine = pagedkv.Engine(small, **settings, compile=True)
    assert not counters["graph_break"]
    yield engine, printed.getvalue(), counters["stats"]["unique_graphs"]
    engine.check_integrity()


@pytest.fixture(scope="module")
def compiled(compiling):
    return compiling[0]


def test_compiling_prints_no_tables(compiling):
    assert "autotune" not in compiling[1].lower()


def test_compiled_steps_give_the_tokens_of_generate(small, compiled):
    results = compiled.generate(prompts(10, 1, 30), max_new_tokens=16)
    assert_native(small, results, max_new_tokens=16)


def test_one_whole_graph_for_prompts_and_decode_and_none_while_serving(compiling):
    compiled, _, graphs = compiling
    assert graphs == 1
    counters.clear()  # other engines may have been made between
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (1, 2, 3, 5, 6):
            compiled.generate(prompts(count, 1, 30, seed=count), max_new_tokens=5)
    assert not counters["stats"]["unique_graphs"]


def test_speculation_and_samples_beside_compiled_steps(small, compiled):
    repetitive = [(prompt * 5)[:24] for prompt in prompts(3, 3, 6, seed=2)]
    results = compiled.generate(repetitive, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert_native(small, results, max_new_tokens=20)
    results = compiled.generate(prompts(2, 5, 9), max_new_tokens=9, num_return_sequences=3, do_sample=True, seed=1)
    assert len({tuple(result.token_ids) for result in results}) == 6


def test_engines_do_not_take_each_others_graphs_and_may_compute_one_token(compiled, make_engine, untuned):
    """Graphs are used without looking at the model they were made of, and traced with more tokens than one."""
    other = build_llama(num_hidden_layers=1, initializer_range=0.4)
    engine = make_engine(other, max_num_seqs=1, max_num_batched_tokens=1, compile=True)
    assert_native(other, engine.generate(prompts(3, 1, 6), max_new_tokens=6), max_new_tokens=6)


def test_a_graph_traced_for_one_row_serves_no_other_number(make_engine):
    """The path of a CUDA device: a size of 1 is a constant of its graph, so a batch of 4 must not find that graph."""
    model = build_llama(num_hidden_layers=1)
    engine = make_engine(model, max_num_seqs=4)
    runner = engine.runner
    counters.clear()
    runner._compile(None, is_one_graph=False)
    assert counters["stats"]["unique_graphs"] == 2  # of any batch, and of 1
    single = make_engine(model, max_num_seqs=1).runner
    single._compile(None, is_one_graph=False)
    assert counters["stats"]["unique_graphs"] == 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (1, 4, 1, 2, 3):
            assert_native(model, engine.generate(prompts(count, 1, 20), max_new_tokens=6), max_new_tokens=6)


def test_captured_graphs_are_replayed_per_bucket(llama, make_engine, monkeypatch):
    """The path of a CUDA device, with graphs that compute again when they are replayed."""
    captured = []

    class Graph:
        def replay(self):
            captured.append(self)
            self.logits.copy_(self.compute())

    engine = make_engine(llama, max_num_seqs=4)
    runner = engine.runner
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())
    runner._capture()
    assert sorted(runner._graphs) == runner.config.buckets == [1, 2, 4]
    for size, (graph, logits) in runner._graphs.items():
        graph.logits, graph.compute = logits, functools.partial(_again, runner, size)
    for count, size in ((1, 1), (2, 2), (3, 4)):
        captured.clear()
        assert_native(llama, engine.generate(prompts(count, 1, 20), max_new_tokens=8), max_new_tokens=8)
        assert captured == [runner._graphs[size][0]] * 7  # the first token comes with the prompt


def _again(runner, size):
    return runner.patch.run(runner._forward, runner._inputs[size])


def test_padding_rows_change_nothing(llama, make_engine):
    asked = prompts(3, 5, 20)
    exact = make_engine(llama, max_num_seqs=3, buckets=[3]).generate(asked, max_new_tokens=10)
    padded = make_engine(llama, max_num_seqs=8, buckets=[8]).generate(asked, max_new_tokens=10)
    assert [result.token_ids for result in exact] == [result.token_ids for result in padded]


class _Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "pagedkv":
            self.names.append(function._schema.name)
        return function(*args, **kwargs or {})


def test_a_layer_is_one_append_in_prompts_and_decode(llama, make_engine):
    engine = make_engine(llama)
    engine.add_request([1, 2, 3], max_new_tokens=3)
    for _ in range(2):
        with _Calls() as calls:
            engine.step()
        assert calls.names == ["pagedkv::paged_attention_append"] * llama.config.num_hidden_layers


def test_the_graph_holds_no_clone_of_a_cache(small, make_engine):
    engine = make_engine(small, max_num_seqs=2)
    runner = engine.runner
    layer = runner.cache.paged[0]
    inputs = runner._inputs[2]
    runner._warm_up(inputs)

    def step(ids, positions):
        return runner._call(ids, positions, None, inputs.indices)

    caches = [layer.key_cache, layer.value_cache]
    with torch.no_grad():
        runner.patch.run(assert_no_cache_clone, step, inputs.ids, inputs.positions, caches=caches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a CUDA device")
def test_captured_graphs_replay_what_eager_steps_compute(make_engine):
    model = build_llama().cuda()
    asked = prompts(10, 1, 30)
    eager = make_engine(model, cuda_graphs=False).generate(asked, max_new_tokens=16, logprobs=0)
    engine = make_engine(model, cuda_graphs=True)
    assert sorted(engine.runner._graphs) == engine.runner.config.buckets
    captured = engine.generate(asked, max_new_tokens=16, logprobs=0)
    assert [(result.token_ids, result.logprobs) for result in captured] == [
        (result.token_ids, result.logprobs) for result in eager
    ]
