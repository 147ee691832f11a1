"""A prefix is hit only where the model and all inputs are those that computed it: native tokens, always."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from identities import HIT, PROMPT, assert_computes, assert_identity, computed, generate, natives, patch, patch_of
from models import tiny
from torch.nn.utils import parametrize

import pagedkv
from tests.adapters import peft, set_scale, swap_data, with_adapters


def adapted(config=None, layers=3, **options):
    return with_adapters(tiny("llama", num_hidden_layers=layers), config, **options)


def write(model, name="k_proj", through_data=False):
    weight = model.model.layers[0].self_attn.get_submodule(name).weight
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(-1.5)


def replace(model):
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight = torch.nn.Parameter(-layer.k_proj.weight.detach())


def swap(model):
    layer = model.model.layers[0].self_attn.k_proj
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(-layer.weight.detach()))


class Negated(torch.nn.Module):
    def forward(self, weight):
        return -weight


CHANGES = {
    "written in place": write,
    "written through data": lambda model: write(model, through_data=True),
    "replaced": replace,
    "swap_tensors": swap,
    "buffer written": lambda model: model.model.rotary_emb.inv_freq.mul_(1.5),
    "module replaced": lambda model: model.model.layers.__setitem__(0, tiny("llama", seed=3).model.layers[0]),
    "parametrized": lambda model: parametrize.register_parametrization(
        model.model.layers[0].self_attn.k_proj, "weight", Negated()
    ),
    "attribute of a module": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0),
    "eps of a norm": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 1e3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model(change):
    assert_identity(lambda: tiny("llama"), CHANGES[change])


def test_a_cast_model():
    """By way of a type so coarse that tokens differ by more than the roundings of bfloat16 kernels."""
    assert_identity(lambda: tiny("llama", seed=165), lambda model: model.to(torch.float8_e4m3fn).to(torch.bfloat16))


class Controlled(torch.nn.Module):
    """A module of a user's own, with plain attributes that its forward reads."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.control, self.parts = inner, torch.zeros(64), [torch.zeros(64)]

    def forward(self, hidden):
        return self.inner(hidden) + self.control + self.parts[0]


class Gained(torch.nn.Linear):
    gain = 1.0

    def forward(self, hidden):
        return super().forward(hidden) * self.gain


def controlled():
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.mlp = Controlled(layer.mlp)
    layer.self_attn.k_proj.__class__ = Gained
    return model


OWN = {
    "attribute replaced": lambda model: setattr(model.model.layers[0].mlp, "control", torch.linspace(-9, 9, 64)),
    "attribute written": lambda model: model.model.layers[0].mlp.control.add_(torch.linspace(-9, 9, 64)),
    "in a list": lambda model: model.model.layers[0].mlp.parts.__setitem__(0, torch.linspace(-9, 9, 64)),
    "number of a Linear": lambda model: setattr(model.model.layers[0].self_attn.k_proj, "gain", -3.0),
    "class": lambda model: setattr(model.model.layers[0].mlp, "__class__", type("Less", (Negative,), {})),
}


class Negative(Controlled):
    def forward(self, hidden):
        return -4 * super().forward(hidden)


@pytest.mark.parametrize("change", OWN)
def test_changed_modules_of_ones_own(change):
    assert_identity(controlled, OWN[change])


def test_a_layer_that_is_gone_is_not_waited_for():
    assert_identity(lambda: tiny("llama"), lambda model: model.model.layers.__delitem__(2))


def test_fewer_layers_by_the_config_are_an_error_that_says_so():
    model = patch(tiny("llama"))
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was patched with 3 attention layers, and .* has 2: unpa"):
        generate(model)
    patch(pagedkv.unpatch(model))
    assert torch.equal(generate(model), generate(pagedkv.unpatch(model)))


def test_a_replaced_forward_of_a_class_finds_nothing(monkeypatch):
    model = patch(tiny("llama"))
    before = generate(model)
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: -4 * forward(self, hidden))
    after = generate(tiny("llama"))
    assert_computes(model, after, 41)
    assert not torch.equal(after, before)


def merge(model):
    model.merge_adapter()


def disable(model):
    model.base_model.disable_adapter_layers()


ADAPTERS = {
    "set_adapter": [lambda model: model.set_adapter("two")],
    "scale is identity": [lambda model: set_scale(model, "one", 0.1)],
    "disabled": [disable],
    "deleted": [lambda model: model.delete_adapter("one") or model.set_adapter("two")],
    "hot-swapped through data": [lambda model: swap_data(model, "two", "one")],
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_changed_adapter(change):
    assert_identity(adapted, *ADAPTERS[change])


KINDS = {
    "dora": lambda: peft.LoraConfig(target_modules=["k_proj", "v_proj"], use_dora=True, init_lora_weights=False),
    "rslora": lambda: peft.LoraConfig(target_modules=["k_proj"], use_rslora=True, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(target_modules=["k_proj", "v_proj"], init_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["k_proj"], oft_block_size=4, init_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=["k_proj"], init_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind):
    assert_identity(lambda: adapted(KINDS[kind]()), lambda model: model.set_adapter("two"), disable)


def test_merged_and_unmerged_adapters_share_nothing():
    """Merging rounds: the tokens of before or after come again only with the blocks of before or after."""
    model = adapted()
    expected = generate(model)
    patch(model)
    for change in (None, model.merge_adapter, model.unmerge_adapter):
        if change is not None:
            change()
        assert_computes(model, expected, 41)


def test_back_to_an_adapter_finds_its_prefix():
    model = adapted()
    expected = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        expected[name] = generate(model)
    patch(model)
    for name, width in (("one", 41), ("two", 41), ("one", HIT)):
        model.set_adapter(name)
        assert_computes(model, expected[name], width)


def test_hot_swapped_and_back_finds_nothing():
    """Nobody knows when the values were swapped, so what was published before is not trusted."""
    model = adapted()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = generate(model)
    patch(model)
    generate(model)
    swap_data(model, "two", "one")
    generate(model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])
    assert_computes(model, expected, 41)


OTHER = {
    "position_ids": lambda: {"position_ids": torch.arange(100, 141)[None] * 2},
    "positions inside": lambda: {"position_ids": (torch.arange(41) + (torch.arange(41) > 20))[None]},
}


@pytest.mark.parametrize("other", OTHER)
def test_other_positions(other):
    model = tiny("llama")
    inputs = [{}, OTHER[other](), {}]
    expected = [generate(model, **given) for given in inputs]
    assert not torch.equal(expected[0], expected[1])
    patch(model)
    for given, native, width in zip(inputs, expected, (41, 41, HIT), strict=True):
        assert_computes(model, native, width, **given)


def test_other_adapter_names():
    model = adapted()
    asked = [["one"], ["two"], ["__base__"], ["one"]]
    expected = [generate(model, adapter_names=names) for names in asked]
    assert not torch.equal(expected[0], expected[1])
    patch(model)
    for names, native in zip(asked, expected, strict=True):
        assert torch.equal(generate(model, adapter_names=names), native)
    assert torch.equal(generate(model), generate(pagedkv.unpatch(model)))


@pytest.mark.parametrize("padding", [0, 3])
def test_forward_by_hand_publishes_only_what_its_key_covers(padding):
    """Without position_ids a model counts columns: tokens behind padding are elsewhere than generate has them."""
    model = tiny("llama")
    ids, mask = PROMPT["input_ids"], PROMPT["attention_mask"]
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, padding, dtype=torch.long), mask], 1)
    expected = generate(model)
    patch(model)
    handle = patch_of(model)
    cache = handle.new_cache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, **{handle.cache_name: cache})
    cache.reset()
    assert_computes(model, expected, 41 if padding else HIT)


def test_a_chat_that_changes_its_adapter_publishes_nothing_more():
    model = adapted()
    patch(model)
    handle = patch_of(model.get_base_model())
    first = generate(model, return_dict_in_generate=True)
    model.set_adapter("two")
    longer = torch.cat([first.sequences, torch.arange(60, 81)[None]], 1)
    asked = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    generate(model, **asked, **{handle.cache_name: first[handle.cache_name]})
    first[handle.cache_name].reset()
    for name in ("one", "two"):
        model.set_adapter(name)
        got = generate(model, **asked)
        pagedkv.unpatch(model)
        assert torch.equal(got, generate(model, **asked))
        patch(model)


def test_active_dropout_neither_hits_nor_publishes():
    model = adapted(lora_dropout=0.5)
    expected = generate(model)
    patch(model)
    for _ in range(2):
        model.train()
        assert computed(model)[1] == 41
    model.eval()
    assert_computes(model, expected, 41)
    assert_computes(model, expected, HIT)


def test_a_changed_config_finds_nothing():
    model = patch(tiny("llama"))
    for factor, width in ((1.0, 41), (2.0, 41), (1.0, HIT)):
        model.config.rope_parameters["factor"] = factor
        assert computed(model)[1] == width


@contextmanager
def hook(model):
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: out + vector)
    yield
    handle.remove()


@contextmanager
def global_hook(model):
    norm = model.model.layers[1].input_layernorm
    negate = lambda module, args, out: -out if module is norm else None  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(negate)
    yield
    handle.remove()


@contextmanager
def replaced_forward(model):
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward
    norm.forward = lambda hidden: -forward(hidden)
    yield
    del norm.forward


@pytest.mark.parametrize("private", [hook, global_hook, replaced_forward])
def test_hooks_neither_hit_nor_publish(private):
    twin, model = tiny("llama"), patch(tiny("llama"))
    plain = generate(twin)
    with private(twin):
        steered = generate(twin)
    assert not torch.equal(steered, plain)
    for _ in range(2):
        with private(model):
            assert_computes(model, steered, 41)
    assert_computes(model, plain, 41)
    with private(model):
        assert_computes(model, steered, 41)
    assert_computes(model, plain, HIT)


COMPILED = {
    "scale": lambda model: set_scale(model, "one", 0.1),
    "adapter": lambda model: model.set_adapter("two"),
    "weight": lambda model: write(model.get_base_model(), "o_proj"),
    "hook": lambda model: (
        model.get_base_model().model.layers[0].register_forward_hook(lambda module, args, out: -out) and None
    ),
}


def test_a_compiled_step_follows():
    """One after the other, in one model: compiling is slow. The hook is what torch.compile guards by nothing."""
    expected = natives(lambda: adapted(layers=1), *COMPILED.values())
    model = adapted(layers=1)
    pagedkv.patch(model, num_blocks=256, block_size=4, compile={"backend": "eager"})
    assert torch.equal(generate(model), expected[0])
    for before, native, name in zip(expected, expected[1:], COMPILED, strict=False):
        COMPILED[name](model)
        assert not torch.equal(native, before)
        assert torch.equal(generate(model), native), name
