"""What patch, PagedCache and a patched model refuse by name, and the names that their texts point to."""

from __future__ import annotations

import ast
import inspect
import operator
import re
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from models import ragged, tiny, with_cache
from transformers import (
    AutoConfig,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache

import pagedkv
import pagedkv.hf
from pagedkv.hf import Pool


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


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
        return model.generate(ids, **options, **with_cache(model, wrap(paged))), paged

    output, paged = generate(lambda paged: EncoderDecoderCache(paged, DynamicCache()))
    assert torch.equal(output, native)
    assert paged.pool.peak_used_blocks > 0
    for wrap in (lambda paged: paged, lambda paged: EncoderDecoderCache(DynamicCache(), paged)):
        with pytest.raises(NotImplementedError, match=r"got its cross-attention; give the model an EncoderDecoder"):
            generate(wrap)
    with pytest.raises(pagedkv.UnsupportedModelError, match="encoder-decoder"):
        pagedkv.patch(model)


def _weights(model, inputs, cache=None):
    with torch.no_grad():
        return model(**inputs, output_attentions=True, **with_cache(model, cache)).attentions


def test_output_attentions_are_the_models_own_or_refused_by_name():
    model, inputs = tiny("gemma3_text", attn_implementation="eager"), ragged([9, 4, 12])
    options = {"max_new_tokens": 4, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    native, forward = model.generate(**inputs, **options), _weights(model, inputs)

    def assert_native(output):
        assert torch.equal(output.sequences, native.sequences)
        torch.testing.assert_close(output.attentions, native.attentions, atol=1e-5, rtol=0)

    with pagedkv.patched(model, num_blocks=64):
        assert_native(model.generate(**inputs, **options))
        torch.testing.assert_close(_weights(model, inputs), forward)
        cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
        for ask in (
            lambda: _weights(model, inputs, cache),
            lambda: model.generate(**inputs, **options, **with_cache(model, cache)),
        ):
            with pytest.raises(NotImplementedError, match=r"attention that they do not give \(its weights"):
                ask()
            cache.reset()
        model.config.output_attentions = True
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), native.sequences)
        model.config.output_attentions = False
    model.set_attn_implementation("pagedkv")
    assert_native(
        model.generate(**inputs, **options, **with_cache(model, pagedkv.PagedCache(model.config, num_blocks=64)))
    )


def test_num_blocks_beyond_the_memory_are_named_when_a_forward_shows_what_a_token_takes():
    model = tiny("llama", num_key_value_heads=4, num_attention_heads=4, head_dim=4096)
    cache = pagedkv.PagedCache(model.config, num_blocks=200_000)
    model.set_attn_implementation("pagedkv")
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"^num_blocks=200000: .* bytes in all$"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **with_cache(model, cache))


_TYPES = (
    "kv_dtype: expected torch.float32, torch.float16, torch.bfloat16, 'int8', 'fp8_e4m3' or 'fp8_e5m2', got "  # or None
)
_MEMORY = "memory: expected an int of bytes or a fraction above 0 and up to 1, got "
# with numbers of five digits and more as N
_SIZES = [
    ({"block_size": 0}, "block_size: expected at least 1, got 0"),
    ({"block_size": "x"}, "block_size: expected an int, got 'x'"),
    ({"num_blocks": 1}, "num_blocks: expected at least 2 (one is the null block), got 1"),
    ({"num_blocks": 3.5}, "num_blocks: expected an int, got 3.5"),
    ({"num_blocks": True}, "num_blocks: expected an int, got True"),
    ({"num_blocks": 8, "memory": 0.5}, "num_blocks, memory: expected one of them, got (8, 0.5)"),
    ({"memory": "x"}, _MEMORY + "'x'"),
    ({"memory": 0}, _MEMORY + "0"),
    ({"memory": 1.5}, _MEMORY + "1.5"),
    ({"memory": float("nan")}, _MEMORY + "nan"),
    ({"memory": 2**44}, "memory: expected at most the N bytes of cpu, got N"),
    ({"kv_dtype": "x"}, _TYPES + "'x'"),
    ({"kv_dtype": torch.uint8}, _TYPES + "torch.uint8"),
]
_ROOM = "memory: expected room for two blocks of {} bytes (one is the null block), got 100"
_TOO_MANY = "={}: expected at most the N bytes of cpu, got {} blocks of {} bytes, N bytes in all"
_POOL = "Pool(0 of 7 blocks of 4 tokens used, windows [{}])"
_EITHER = "pool, {}: expected one of them, got (" + _POOL.format(None) + ", {})"
_WINDOWS = "pool: expected one of windows [None] like the model's layers, got " + _POOL.format(6)
SETTINGS = {
    "patch": [
        *_SIZES,
        ({"memory": 100}, _ROOM.format(12288)),
        ({"block_size": 2**40}, "block_size" + _TOO_MANY.format("N", 2, "N")),
        ({"num_blocks": 2**40}, "num_blocks" + _TOO_MANY.format("N", "N", "N")),
        ({"prefix_caching": "yes"}, "prefix_caching: expected a bool, got 'yes'"),
        ({"compile": "x"}, "compile: expected a bool or a dict of options of torch.compile, got 'x'"),
        ({"compile": {"x": 1}}, "compile: expected a bool or a dict of options of torch.compile, got {'x': 1}"),
    ],
    "PagedCache": [
        *_SIZES,
        ({"block_size": 2**60, "num_blocks": 8}, "block_size: expected at most N, got N"),
        ({"num_blocks": 2**30}, "num_blocks" + _TOO_MANY.format("N", "N", 1536)),
        ({"num_blocks": 2**60}, "num_blocks: expected at most N, got N"),
        ({"pool": "x"}, "pool: expected a pagedkv.hf.Pool or None, got 'x'"),
        ({"pool": Pool(8, 4), "num_blocks": 8}, _EITHER.format("num_blocks", 8)),
        ({"pool": Pool(8, 4), "memory": 0.5}, _EITHER.format("memory", 0.5)),
        ({"pool": Pool(8, 4), "kv_dtype": torch.float16}, _EITHER.format("kv_dtype", "torch.float16")),
        ({"pool": Pool(8, 4), "block_size": 8}, _EITHER.format("block_size", 8)),
        ({"pool": Pool(8, 4, [6])}, _WINDOWS),
        ({"config": 3}, "config: expected a transformers config, got 3"),
    ],
    "Pool": [
        ({"num_blocks": 8, "block_size": 4, "kv_dtype": torch.uint8}, _TYPES + "torch.uint8"),
        ({"num_blocks": 8, "block_size": "x"}, "block_size: expected an int, got 'x'"),
        ({"num_blocks": None, "block_size": 4}, "num_blocks: expected an int, got None"),
    ],
}


@pytest.mark.parametrize(
    ("what", "settings", "message"),
    [(what, *row) for what, rows in SETTINGS.items() for row in rows],
    ids=lambda value: None if isinstance(value, str) and ":" in value else str(value),
)
def test_settings_are_refused_by_name(llama, what, settings, message):
    """Before anything changes, and before they cost memory."""
    make = {
        "patch": partial(pagedkv.patch, llama),
        "PagedCache": lambda **settings: pagedkv.PagedCache(**{"config": llama.config} | settings),
        "Pool": Pool,
    }
    attributes, kind, used = dict(vars(llama)), type(llama), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pagedkv.InvalidArgumentError) as error:
        make[what](**settings)
    assert re.sub(r"\d{5,}", "N", str(error.value)) == re.sub(r"\d{5,}", "N", message)
    assert (vars(llama), type(llama)) == (attributes, kind)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 2**20  # 1 GiB


def test_block_size_may_stand_beside_a_pool_of_the_same():
    pool = Pool(8, 4)
    assert pagedkv.PagedCache(tiny().config, pool=pool, block_size=4).pool is pool


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: None, "model: expected a transformers PreTrainedModel, got NoneType"),
        (lambda: torch.nn.Linear(2, 2), "model: expected a transformers PreTrainedModel, got Linear"),
        (lambda: tiny("mamba", num_hidden_layers=2), "MambaForCausalLM can not be served from blocks: it has no att"),
        (lambda: BertModel(BertConfig(num_hidden_layers=1, hidden_size=24, vocab_size=50)),
         "BertModel can not be served from blocks: it has no generate()"),
    ],
    ids=["None", "no model", "no attention", "no generate"],
)  # fmt: skip
def test_models_are_refused_by_name_and_left_as_they_were(build, message):
    model = build()
    attributes, kind = dict(getattr(model, "__dict__", {})), type(model)
    with pytest.raises((TypeError, pagedkv.UnsupportedModelError), match=re.escape(message)):
        pagedkv.patch(model)
    assert (getattr(model, "__dict__", {}), type(model)) == (attributes, kind)


def test_layers_that_cache_something_else_and_models_that_are_not_patched_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"(indexed|sparse)_attention layers cache more than keys and values"):
        pagedkv.PagedCache(AutoConfig.for_model("deepseek_v32"), num_blocks=4)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        pagedkv.pool(tiny())


def test_a_batch_of_no_rows_is_refused(llama):
    with pagedkv.patched(llama, num_blocks=16), pytest.raises(pagedkv.InvalidArgumentError, match="at least one row"):
        llama.generate(torch.empty((0, 5), dtype=torch.int64), attention_mask=torch.ones(0, 5), max_new_tokens=2)
