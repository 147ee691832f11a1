"""What patch, PagedCache and a patched model refuse by name, and the names that their texts point to."""

from __future__ import annotations

import ast
import doctest
import inspect
import operator
import re
import resource
from pathlib import Path

import pytest
import torch
from models import ragged, tiny
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import EncoderDecoderCache

import pagedkv
import pagedkv.hf
from pagedkv.hf.methods import cache_argument


def test_patch_and_pool_are_functions_and_pool_class_is_public():
    assert inspect.isfunction(pagedkv.hf.patch)
    assert inspect.isfunction(pagedkv.hf.pool)
    assert inspect.isclass(pagedkv.hf.Pool)
    assert pagedkv.hf.patch is pagedkv.patch
    assert pagedkv.hf.layer_modes is pagedkv.layer_modes


def test_names_that_texts_and_docstrings_point_to_exist():
    sources = Path(pagedkv.__file__).parent.rglob("*.py")
    constants = [node.value for path in sources for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    names = {name for text in constants for name in re.findall(r"(?<![\w.:])pagedkv((?:\.[A-Za-z_]\w*)+)", text)}
    assert len(names) > 5
    for name in sorted(names):
        operator.attrgetter(name[1:])(pagedkv)


def test_layer_modes_are_shown_by_the_pool():
    model = tiny("llama")
    pagedkv.patch(model, num_blocks=8)
    assert pagedkv.layer_modes(model) == ["paged"] * 3
    assert repr(pagedkv.pool(model)).endswith(", layers 3 paged)")


def test_examples_in_docstrings_run(capsys):
    doctest.run_docstring_examples(pagedkv.layer_modes, {})
    assert capsys.readouterr().out == ""


def _t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=101, decoder_start_token_id=0, **sizes)).eval()


def _bart(attention="sdpa"):
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 2, "forced_eos_token_id": None}
    config = BartConfig(vocab_size=101, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes, **tokens)
    model = BartForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("build", [_t5, _bart, lambda: _bart("pagedkv")], ids=["t5", "bart", "bart pagedkv"])
def test_encoder_decoder_models(build):
    """The self-attention of an EncoderDecoderCache is served; any other place is refused by name."""
    torch.manual_seed(0)
    model, ids = build(), torch.arange(2, 8).reshape(2, 3)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "eos_token_id": None}
    native = model.generate(ids, **options)

    def generate(wrap):
        paged = pagedkv.PagedCache(model.config, num_blocks=64, block_size=4)
        return model.generate(ids, **options, **{cache_argument(model): wrap(paged)}), paged

    output, paged = generate(lambda paged: EncoderDecoderCache(paged, DynamicCache()))
    assert torch.equal(output, native)
    assert paged.pool.peak_used_blocks > 0
    for wrap in (lambda paged: paged, lambda paged: EncoderDecoderCache(DynamicCache(), paged)):
        with pytest.raises(NotImplementedError, match=r"got its cross-attention; give the model an EncoderDecoder"):
            generate(wrap)
    with pytest.raises(pagedkv.UnsupportedModelError, match="encoder-decoder"):
        pagedkv.patch(model)


def _weights(model, inputs, cache=None):
    arguments = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        return model(**inputs, output_attentions=True, **arguments).attentions


def test_output_attentions_are_the_models_own_or_refused_by_name():
    model, inputs = tiny("gemma3_text", attn_implementation="eager"), ragged([9, 4, 12])
    options = {"max_new_tokens": 4, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    native, forward = model.generate(**inputs, **options), _weights(model, inputs)

    def assert_native(output):
        assert torch.equal(output.sequences, native.sequences)
        torch.testing.assert_close(output.attentions, native.attentions, atol=1e-5, rtol=0)

    name = cache_argument(model)
    with pagedkv.patched(model, num_blocks=64):
        assert_native(model.generate(**inputs, **options))
        torch.testing.assert_close(_weights(model, inputs), forward)
        cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
        for ask in (
            lambda: _weights(model, inputs, cache),
            lambda: model.generate(**inputs, **options, **{name: cache}),
        ):
            with pytest.raises(NotImplementedError, match=r"attention that they do not give \(its weights"):
                ask()
            cache.reset()
        model.config.output_attentions = True
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), native.sequences)
        model.config.output_attentions = False
    model.set_attn_implementation("pagedkv")
    assert_native(model.generate(**inputs, **options, **{name: pagedkv.PagedCache(model.config, num_blocks=64)}))


def test_num_blocks_beyond_the_memory_are_refused_before_they_cost_any():
    """Those that hold too much for any device at once, the others when a forward shows what a token takes."""
    model = tiny("llama")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"^num_blocks=\d+: expected at most the \d+ bytes of cpu"):
        pagedkv.PagedCache(model.config, num_blocks=2**30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # 1 GiB
    model = tiny("llama", num_key_value_heads=4, num_attention_heads=4, head_dim=4096)
    cache = pagedkv.PagedCache(model.config, num_blocks=200_000)
    model.set_attn_implementation("pagedkv")
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"^num_blocks=200000: .* bytes in all$"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **{cache_argument(model): cache})
