"""The ways in which others hold a model: pipelines, from_pretrained, images, device maps, adapters, training."""

from __future__ import annotations

import pytest
import torch
from models import SIZES, generate, ragged, tiny, with_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

import pagedkv
import pagedkv.hf
from pagedkv.hf import UnsupportedModelError

OPTIONS = {"max_new_tokens": 10, "do_sample": False}


def words_tokenizer():
    """Token i is the word ``wi``."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w1"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="w0", padding_side="left")


def test_pipeline():
    model, tokenizer = tiny("gemma3_text"), words_tokenizer()
    prompts = ["w5 w9 w23 w40 w41 w42 w43 w44", "w77", "w3 w4 w5"]

    def texts(model):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=3)
        return [row[0]["generated_text"] for row in generator(prompts, **OPTIONS)]

    expected = texts(model)
    pagedkv.patch(model, num_blocks=64, block_size=4)
    assert texts(model) == expected
    assert pagedkv.pool(model).peak_used_blocks > 0
    assert pagedkv.pool(model).used_blocks == 0


def test_from_pretrained_with_an_explicit_cache(tmp_path):
    native = tiny("gemma3_text")
    native.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="pagedkv").eval()
    cache = pagedkv.PagedCache(model.config, num_blocks=64, block_size=4)
    ids = torch.randint(2, 128, (2, 14))
    with torch.no_grad():
        logits = [model(ids[:, columns], **with_cache(model, cache)).logits for columns in (slice(0, 9), slice(9, 14))]
        torch.testing.assert_close(torch.cat(logits, 1), native(ids).logits, atol=1e-4, rtol=0)
    assert cache.layer_modes == ["paged"] * 3
    assert cache.pool.used_blocks == 8 + 2 * 6  # 14 tokens; past the window of 6 none, in a group for each such layer


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE = 127  # the token that stands for a quarter of an image


def image_model(family):
    text = dict(SIZES)
    options = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_config": VISION}
    if family == "llava":
        text["model_type"] = "llama"
        options["vision_config"] = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
    elif family == "gemma3":  # tokens of one image see each other: its mask is more than causal
        text |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        options |= {"mm_tokens_per_image": 4}
    else:  # positions of three dimensions
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
        options |= {"vision_config": vision, "vision_start_token_id": 125, "vision_end_token_id": 124}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, text_config=text, **options)).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0) if parameter.any() else parameter.normal_()
    return model


def image_inputs(family, seed):
    generator = torch.Generator().manual_seed(seed)
    image = [125, IMAGE] if family == "qwen2_vl" else [IMAGE] * 4
    ids = torch.tensor([[5, 9, *image, 17, 23, 40, 41, 42], [0, 0, *image, 33, 34, 35, 36, 37]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if family == "qwen2_vl":
        inputs["pixel_values"] = torch.randn(8, 3 * 2 * 14 * 14, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    else:
        inputs["pixel_values"] = torch.randn(2, 3, 28, 28, generator=generator)
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl"])
def test_images(family):
    """They share no blocks: a prefix's key has the ids that stand for an image, not the image."""
    model, inputs = image_model(family), {seed: image_inputs(family, seed) for seed in (1, 2)}
    options = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
    text = {"input_ids": torch.arange(2, 14)[None]}
    expected = {seed: model.generate(**given, **options) for seed, given in inputs.items()}
    assert not torch.allclose(expected[1].logits[0], expected[2].logits[0])  # the image matters
    plain = model.generate(**text, **OPTIONS)
    pagedkv.patch(model, num_blocks=64, block_size=4, prefix_caching=True)
    for seed in (1, 1, 2, 1):
        paged, native = model.generate(**inputs[seed], **options), expected[seed]
        assert torch.equal(paged.sequences, native.sequences)
        torch.testing.assert_close(torch.stack(paged.logits), torch.stack(native.logits), atol=1e-4, rtol=0)
    assert pagedkv.pool(model).peak_used_blocks > 0
    for _ in range(2):
        assert torch.equal(model.generate(**text, **OPTIONS), plain)


def test_device_map_over_one_device(tmp_path):
    pytest.importorskip("accelerate")
    tiny("llama").save_pretrained(tmp_path)
    inputs = ragged([9, 4])
    layers = {f"model.layers.{i}": "cpu" for i in range(3)}
    whole = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **layers}
    expected = generate(AutoModelForCausalLM.from_pretrained(tmp_path), inputs, pad_token_id=0)
    for device_map in ("cpu", "auto", whole):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        pagedkv.patch(model, num_blocks=64)
        assert torch.equal(generate(model, inputs, pad_token_id=0), expected)
        assert pagedkv.pool(model).peak_used_blocks > 0


def test_weights_on_disk_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    tiny("llama").save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    with pytest.raises(UnsupportedModelError, match="meta device"):
        pagedkv.patch(model)


def gradients(model, inputs, **options):
    model.train()
    model.zero_grad()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels, **options).loss
    loss.backward()
    model.eval()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(checkpointing):
    model, inputs = tiny("gemma3_text"), ragged([9, 4, 12])
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = gradients(model, inputs)
    pagedkv.patch(model, num_blocks=64)
    got = gradients(model, inputs)
    assert len(got) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert pagedkv.pool(model).peak_used_blocks == 0
    generated = generate(model, inputs)  # between two steps of training
    assert pagedkv.pool(model).peak_used_blocks > 0
    assert torch.equal(generated, generate(pagedkv.unpatch(model), inputs))


def test_lora_trains_switches_and_merges():
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    inputs = ragged([9, 4, 12])

    def build():
        model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
        return model

    def outputs(model):
        results = gradients(model, inputs)
        for name in ("two", "one"):
            model.set_adapter(name)
            results.append(generate(model, inputs))
        with model.disable_adapter():
            results.append(generate(model, inputs))
        model.merge_adapter()
        results.append(generate(model, inputs))
        return results

    expected = outputs(build())
    assert not torch.equal(expected[-4], expected[-3])
    model = pagedkv.patch(build(), num_blocks=64)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))
    assert pagedkv.pool(model).peak_used_blocks > 0
