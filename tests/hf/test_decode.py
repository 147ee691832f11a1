"""A decode step of a patched model: one op per layer, written exactly once whatever the model does with its keys."""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import generate, ragged, tiny, with_cache
from recorded_graphs import recording
from torch.utils._python_dispatch import TorchDispatchMode

import pagedkv
from pagedkv.hf import capturing, compiling, paged_layers

FAMILIES = ["llama", "gemma3_text", "gpt_oss"]


class OpCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "pagedkv":
            self.names.append(function._schema.name.removeprefix("pagedkv::"))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_an_eager_decode_step_is_one_append(family):
    model, inputs = tiny(family), ragged([9, 4])
    expected = generate(model, inputs)
    pagedkv.patch(model, num_blocks=64, block_size=4)
    with OpCalls() as calls:
        assert torch.equal(generate(model, inputs), expected)
    prompt, decode = ["write_kv", "paged_attention"] * 3, ["paged_attention_append"] * 3
    assert calls.names == prompt + decode * 9


def test_a_cache_of_a_model_that_is_not_patched_writes_at_once():
    """Nobody would write behind its forwards what no attention took."""
    model, inputs = tiny("llama"), ragged([9, 4])
    expected = generate(model, inputs)
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=64, block_size=4)
    with OpCalls() as calls:
        assert torch.equal(generate(model, inputs, **with_cache(model, cache)), expected)
    assert calls.names == ["write_kv", "paged_attention"] * 3 * 10


def test_a_layer_of_a_compiled_decode_step_is_one_append():
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if "pagedkv" in str(node.target)])
        return graph

    model, inputs = tiny("gpt_oss"), ragged([9, 4])
    expected = generate(model, inputs)
    torch._dynamo.reset()
    pagedkv.patch(model, num_blocks=64, block_size=4, compile={"backend": backend, "fullgraph": True})
    assert torch.equal(generate(model, inputs), expected)
    assert graphs == [[torch.ops.pagedkv.paged_attention_append.default] * 3]


class Forwards:
    """A prompt of 6 tokens and steps behind it, with an attention of the test's own in one step."""

    def __init__(self, family="llama"):
        self.model = tiny(family)
        self.ids = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            self.expected = self.model(self.ids).logits
        pagedkv.patch(self.model, num_blocks=64, block_size=4)
        self.cache = pagedkv.PagedCache(self.model.config, pool=pagedkv.pool(self.model))
        self(0, 6)

    def __call__(self, start, stop):
        with torch.no_grad():
            return self.model(self.ids[:, start:stop], **with_cache(self.model, self.cache)).logits

    def check(self, start):
        logits = torch.cat([self(i, i + 1) for i in range(start, 12)], 1)
        torch.testing.assert_close(logits, self.expected[:, start:], atol=1e-4, rtol=0)


def test_keys_that_no_attention_takes_are_written(monkeypatch):
    forwards = Forwards()
    with monkeypatch.context() as patch, OpCalls() as calls:
        patch.setattr(paged_layers.PagedLayer, "attend", lambda self, query, *args, **options: query.transpose(1, 2))
        layer = forwards.cache.layers[0]
        first = layer.key_cache.clone()
        forwards(6, 7)
    assert calls.names == ["write_kv"] * 3
    assert layer.pending is None
    assert not torch.equal(layer.key_cache, first)
    forwards.cache.crop(-1)
    forwards.check(6)


def test_keys_that_attention_sees_copies_of_are_written_once(monkeypatch):
    """Attention that is given other tensors than update was: both ops, and the tokens of before."""
    forwards = Forwards()
    attend = paged_layers.PagedLayer.attend

    def copied(self, query, key, value, *args, **options):
        return attend(self, query, key.clone(), value, *args, **options)

    with monkeypatch.context() as patch, OpCalls() as calls:
        patch.setattr(paged_layers.PagedLayer, "attend", copied)
        forwards.check(6)
    assert calls.names == ["write_kv", "paged_attention"] * 3 * 6


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_step_that_fails_before_a_layer_wrote_can_be_made_again(monkeypatch, layer):
    forwards = Forwards()
    attend, cache = paged_layers.PagedLayer.attend, forwards.cache

    def failing(self, *args, **options):
        if self is cache.layers[layer]:
            raise RuntimeError("no memory")
        return attend(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(paged_layers.PagedLayer, "attend", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            forwards(6, 7)
    assert cache.state._is_unfinished
    assert (cache.get_seq_length(), cache.state.seen) == (7, 7)
    cache.crop(-1)
    forwards.check(6)
    assert not cache.state._failed
    cache.reset()
    assert pagedkv.pool(forwards.model).used_blocks == 0


def steps(model, device, inputs, **options):
    """The tokens of a call, and what its decode steps launched: ops that the host called, and graphs."""
    device.clear()
    with OpCalls() as calls:
        tokens = generate(model, inputs, **options)
    appends = calls.names.count("paged_attention_append") // 3
    return tokens, appends - device.count("replay"), device.count("replay")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_step_on_cuda_is_one_replay(family, device):
    model = tiny(family)
    asked = [ragged([9, 4]), ragged([9, 4], seed=1), ragged([5]), ragged([3, 5, 2]), ragged([6, 2], seed=2)]
    expected = [generate(model, inputs, max_new_tokens=14) for inputs in asked]
    pagedkv.patch(model, num_blocks=64, block_size=4, compile=True)
    counts = []
    for inputs, tokens in zip(asked, expected, strict=True):
        got, called, replayed = steps(model, device, inputs, max_new_tokens=14)
        assert torch.equal(got, tokens)
        assert pagedkv.pool(model).used_blocks == 0
        counts.append((called, replayed))
    # of 13 steps one is called as it is, one called for the capture, both once for each number of rows
    assert counts == [(2, 12), (0, 13), (2, 12), (2, 12), (0, 13)]


def test_replays_follow_the_model(device):
    model, inputs = tiny("llama"), ragged([9, 4])
    pagedkv.patch(model, num_blocks=64, block_size=4, compile=True)
    steps(model, device, inputs)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(-1.5)  # read where it is
    written, *counts = steps(model, device, inputs)
    assert counts == [0, 9]
    layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.flip(0))
    replaced, *counts = steps(model, device, inputs)
    assert counts == [2, 8]
    handle = layer.register_forward_hook(lambda module, args, output: output * 0.5)
    hooked, *counts = steps(model, device, inputs)
    assert counts == [9, 0]
    pagedkv.unpatch(model)
    assert torch.equal(generate(model, inputs), hooked)
    handle.remove()
    assert torch.equal(generate(model, inputs), replaced)
    assert not torch.equal(written, replaced)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"output_logits": True, "return_dict_in_generate": True}], ids=str
)
def test_replays_serve_what_generate_can_ask_for(options, device):
    model, inputs = tiny("llama"), ragged([9, 4])
    expected = generate(model, inputs, **options)
    pagedkv.patch(model, num_blocks=64, block_size=4, compile=True)
    tokens, called, replayed = steps(model, device, inputs, **options)
    assert (called, replayed) == (2, 8)
    if "output_logits" in options:
        torch.testing.assert_close(torch.stack(tokens.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)
        tokens, expected = tokens.sequences, expected.sequences
    assert torch.equal(tokens, expected)


def test_outputs_of_replays_may_be_kept(device, monkeypatch):
    model, inputs, outputs = tiny("llama"), ragged([9, 4]), []
    pagedkv.patch(model, num_blocks=64, block_size=4, compile=True)
    call = compiling.CompiledStep.__call__
    monkeypatch.setattr(
        compiling.CompiledStep, "__call__", lambda self, **inputs: outputs.append(call(self, **inputs)) or outputs[-1]
    )
    tokens = generate(model, inputs)
    kept = torch.cat([output.logits.argmax(-1) for output in outputs], 1)
    assert torch.equal(kept, tokens[:, -9:])
    assert device.count("replay") == 8


def test_a_step_that_can_not_be_captured_is_called(device, monkeypatch, caplog):
    @contextlib.contextmanager
    def failing(graph, pool):
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    model, inputs = tiny("llama"), ragged([9, 4])
    expected = generate(model, inputs)
    pagedkv.patch(model, num_blocks=64, block_size=4, compile=True)
    monkeypatch.setattr(torch.cuda, "graph", failing)
    tokens, called, replayed = steps(model, device, inputs)
    assert torch.equal(tokens, expected)
    assert (called, replayed) == (11, 0)  # 9 steps, and the capture twice
    [record] = [record for record in caplog.records if record.name == "pagedkv.hf.capturing"]
    assert " can not be captured, in failing at `raise RuntimeError(" in record.getMessage()
    assert torch.equal(generate(model, inputs), expected)


def test_captures_are_made_on_the_device_of_the_step(device, monkeypatch):
    entered, captured = [], []

    @contextlib.contextmanager
    def current(name):
        entered.append(name)
        yield
        entered.pop()

    def recording_on(graph, pool):
        captured.append([*entered])
        return recording(graph, pool)

    monkeypatch.setattr(capturing, "current", current)
    monkeypatch.setattr(torch.cuda, "graph", recording_on)
    with pagedkv.patched(tiny(), block_size=4, num_blocks=64, compile=True) as model:
        generate(model, ragged([3]))
        assert captured == [[model.device]]
