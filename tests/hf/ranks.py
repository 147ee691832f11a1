"""What each process of the tensor parallel tests does; what it found is saved for the tests to judge."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

NEW = {"max_new_tokens": 10, "do_sample": False}
LENGTHS = [9, 4, 13]


def inputs():
    from models import ragged

    return ragged(LENGTHS)


def prompts():
    rows = inputs()
    pairs = zip(rows["input_ids"], rows["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


def load(folder, name):
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=config).eval()
    key = model.model.layers[0].self_attn.k_proj
    assert getattr(key.weight, "to_local", lambda: key.weight)().shape[0] < key.out_features  # it is divided
    return model


def generated(model):
    return model.generate(**inputs(), **NEW)[:, max(LENGTHS) :].tolist()


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def tokens(folder, name, compile=False):
    """Of ``generate`` on blocks and of the engine, and what the blocks held."""
    import pagedkv

    model = load(folder, name)
    options = {}
    if compile:  # Inductor takes its time: the engine's forward alone goes through it
        with pagedkv.patched(model, num_blocks=32, compile=True):
            assert not model.__dict__["_pagedkv_patch"].compiled._is_frozen  # freezing fails on DTensors
        options = {"compile": {"backend": "aot_eager"}}
    pagedkv.patch(model, num_blocks=32, **options)
    found = {"generate": generated(model)}
    pool = pagedkv.hf.pool(model)
    found["kv_heads"] = {spec.num_kv_heads for _, spec in pool._stores}
    found["used"], found["peak"] = pool.used_blocks, pool.peak_used_blocks
    pagedkv.unpatch(model)
    with pagedkv.Engine(model, num_blocks=32, block_size=4, compile=compile) as engine:
        found["engine"] = [result.token_ids for result in engine.generate(prompts(), **NEW)]
    return found


def sizes(folder, rank):
    """Pools of ranks that ask for unequal numbers of blocks, one of which may be impossible."""
    import pagedkv

    model = load(folder, "llama-2")
    own = [100, 63][rank]
    found = {"patch": pagedkv.hf.pool(pagedkv.patch(model, num_blocks=own)).num_blocks}
    pagedkv.unpatch(model)
    with pagedkv.Engine(model, num_blocks=own) as engine:
        found["engine"] = engine.manager.pool.num_usable + 1
    pagedkv.patch(model, memory=[10_000_000, 9_000_000][rank])
    found["memory"] = pagedkv.hf.pool(model).num_blocks
    pagedkv.unpatch(model)
    impossible = [100, 1 << 50][rank]
    found["errors"] = [error_of(call, model, num_blocks=impossible) for call in (pagedkv.patch, pagedkv.Engine)]
    found["is_unpatched"] = error_of(pagedkv.hf.pool, model)
    return found


def changed_weights(folder):
    """Tokens with a filled and with an empty prefix cache, after a new parameter and after a write."""
    import pagedkv

    model = load(folder, "llama-2")
    pagedkv.patch(model, num_blocks=64, block_size=4, prefix_caching=True)
    key = model.model.layers[0].self_attn.k_proj
    found = []
    for change in (lambda: setattr(key, "weight", torch.nn.Parameter(key.weight * -2)), lambda: key.weight.mul_(-1)):
        generated(model)
        with torch.no_grad():
            change()
        cached = generated(model)
        pagedkv.clear_prefix_cache(model)
        found.append((cached, generated(model)))
    return found


def refusals(folder):
    import pagedkv

    model = load(folder, "llama-3")
    return [error_of(call, model, num_blocks=32) for call in (pagedkv.patch, pagedkv.Engine)]


def own_model(rank, num_kv_heads):
    from sharded_decoder import Rank, Weights, generate

    from pagedkv.tensor_parallel import agree_on_num_blocks

    def reduce(part):
        dist.all_reduce(part)
        return part

    num_blocks = agree_on_num_blocks([100, 63][rank])
    decoder = Rank(Weights(8, num_kv_heads), rank, 2, num_blocks, reduce)
    return {"tokens": generate(decoder, [3, 1, 4, 1, 5], 12), "num_blocks": num_blocks}


def work(rank: int, num_ranks: int, folder) -> None:
    """Run every case and save what each found, or its traceback."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), HF_HUB_OFFLINE="1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    cases = {
        "llama-2": lambda: tokens(folder, "llama-2"),
        "llama-4": lambda: tokens(folder, "llama-4"),
        "compiled": lambda: tokens(folder, "one-layer", compile=True),
        "sizes": lambda: sizes(folder, rank),
        "changed weights": lambda: changed_weights(folder),
        "refusals": lambda: refusals(folder),
        "own 1": lambda: own_model(rank, 1),
        "own 2": lambda: own_model(rank, 2),
    }
    found = {}
    try:
        for name, case in cases.items():
            found[name] = case()
    except Exception:
        found[name] = traceback.format_exc()
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
