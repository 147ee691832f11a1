"""Compiled decoding: one graph per kind of batch size, no breaks, no recompiles with length, tokens of eager.

Dynamo decides graphs, breaks and recompiles before any backend runs: ``backend="eager"`` keeps the tests quick. One
test goes through Inductor.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from models import EXTRA, ragged, tiny, with_cache
from torch._dynamo.utils import counters
from transformers import CompileConfig

import pagedkv
import pagedkv.hf

BATCHES = [ragged([5, 9, 3]), ragged([7, 2]), ragged([8, 8, 1, 4], seed=2)]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs():
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def auto_compile():
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def small(family):
    """Two layers, of both kinds where the family has two."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if "layer_types" in EXTRA[family] else {}
    return tiny(family, num_hidden_layers=2, **kinds)


@pytest.mark.parametrize(
    ("way", "family"),
    [("patch", "gemma3_text"), ("generate", "gpt_oss"), ("forward", "llama"), ("module", "gemma3_text")],
)
def test_graphs(family, way):
    model = small(family)
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = [model.generate(**batch, **options) for batch in BATCHES]
    pagedkv.patch(model, block_size=4, num_blocks=256, compile={"backend": "eager"} if way == "patch" else False)
    if way == "generate":
        options |= auto_compile()
    elif way == "forward":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    elif way == "module":
        model.compile(fullgraph=True, backend="eager")
    graphs = []
    for batch, tokens in zip(BATCHES, expected, strict=True):
        assert torch.equal(model.generate(**batch, **options), tokens)
        graphs.append(num_graphs())
    if way in ("forward", "module"):  # prefill is compiled too, with its own shapes
        assert graphs[-1] <= 5
    else:
        assert graphs == [1, 2, 2]  # batch 3; any batch; nothing new
    assert pagedkv.pool(model).used_blocks == 0


@pytest.mark.parametrize(("way", "family"), [("wrapped", "gpt_oss"), ("forward", "gemma3_text"), ("inlined", "llama")])
def test_explicit_cache_outside_generate(family, way):
    """The user's own decode loop: one graph of the prompt, one of every later step."""
    model = small(family)
    ids = torch.randint(2, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    pagedkv.patch(model, num_blocks=64, block_size=4)
    call = model
    if way == "wrapped":
        call = torch.compile(model, backend="eager", fullgraph=True)
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    else:  # leaves the compiled function for the planning, once
        call = torch.compile(lambda ids, **kwargs: model(ids, **kwargs), backend="eager")
    cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
    with torch.no_grad():
        logits = [call(ids[:, :6], **with_cache(model, cache)).logits]
        logits += [call(ids[:, i : i + 1], **with_cache(model, cache)).logits for i in range(6, 30)]
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=0)
    assert pagedkv.pool(model).used_blocks > 0
    assert cache.layer_modes == ["paged"] * 2
    if way == "inlined":
        counters["graph_break"].clear()
    assert num_graphs() == 2


def test_a_cache_that_nobody_plans_for_is_refused_by_name():
    model = tiny("llama")
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"pagedkv.patch\(model\)"):
        compiled(torch.tensor([[5, 6, 7]]), **with_cache(model, cache))


def test_lengths_1_to_300():
    model = small("gpt_oss")
    inputs, options = ragged([1]), {"max_new_tokens": 300, "do_sample": False}
    expected = model.generate(**inputs, **options)
    pagedkv.patch(model, block_size=16, num_blocks=256, compile={"backend": "eager", "fullgraph": True})
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert num_graphs() == 1
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert num_graphs() == 1


def test_inductor_has_one_graph_for_one_row_and_one_for_more_until_weights_change():
    """A graph traced for one row serves no other number; and on CPU Inductor takes the weights for constants."""
    model = tiny("gemma3_text", num_hidden_layers=1, layer_types=["sliding_attention"])
    batches = [(ragged([6]), 10), (ragged([3, 8, 2, 5], seed=4), 40), (ragged([6]), 10), (ragged([2, 5, 7], seed=6), 5)]
    expected = [model.generate(**batch, max_new_tokens=n, do_sample=False) for batch, n in batches]
    pagedkv.patch(model, block_size=4, num_blocks=128, compile=True)
    graphs = []
    for (batch, n), tokens in zip(batches, expected, strict=True):
        assert torch.equal(model.generate(**batch, max_new_tokens=n, do_sample=False), tokens)
        assert pagedkv.pool(model).used_blocks == 0
        graphs.append(num_graphs())
    assert graphs == [1, 2, 2, 2]
    weight = model.get_output_embeddings().weight
    weight.data.copy_(weight.flip(0))  # as no version counts it
    changed = model.generate(**batches[3][0], max_new_tokens=12, do_sample=False)
    assert num_graphs() == 3
    assert not torch.equal(changed[:, :-7], expected[3])
    pagedkv.unpatch(model)
    assert torch.equal(changed, model.generate(**batches[3][0], max_new_tokens=12, do_sample=False))
