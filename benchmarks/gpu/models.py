"""Models with random weights, and what is checked on them: ``Engine`` and ``patch`` give the model's own tokens."""

from __future__ import annotations

from typing import Any

import torch

from .device import DEVICE, REHEARSAL

NEW_TOKENS = 6 if REHEARSAL else 24
NUM_BLOCKS = 200  # not a share of free memory: other processes use the device at the same time
_LENGTHS = (3, 9) if REHEARSAL else (3, 40, 17, 100, 64, 5)


def make(dtype: torch.dtype, **sizes: int) -> Any:
    """A Llama whose attention is paged as any other's; ``sizes`` of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    if REHEARSAL:
        small |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 200}
        heads |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
        sizes = {}
    torch.manual_seed(0)
    config = LlamaConfig(**(small | heads | sizes), pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(dtype).eval()


def prompts(vocabulary: int, lengths: tuple[int, ...] = _LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def padded(ids: list[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded, for ``generate``."""
    width = max(map(len, ids))
    rows = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=DEVICE)
    return {"input_ids": rows, "attention_mask": mask}


def generate(model: Any, ids: list[list[int]], new_tokens: int, **options: Any) -> Any:
    with torch.inference_mode():
        return model.generate(**padded(ids), max_new_tokens=new_tokens, do_sample=False, **options)


def tokens_of(model: Any, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    return generate(model, ids, new_tokens)[:, max(map(len, ids)) :].tolist()


def run_engine(engine: Any, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    results = engine.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    errors = [result.error for result in results if result.finish_reason == "error"]
    assert not errors, f"{len(errors)} requests failed: {errors[0]}"
    return [list(result.token_ids) for result in results]


def _assert_same(got: list[list[int]], wanted: list[list[int]]) -> None:
    """Of float32: two best logits of a random model are further apart than its rounding."""
    wrong = [i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]
    if wrong:
        first = wrong[0]
        raise AssertionError(f"tokens of prompts {wrong} differ: {got[first]}, the model's own {wanted[first]}")


def check_engine(compile: bool, cuda_graphs: bool) -> dict[str, Any]:
    import pagedkv

    cuda_graphs = cuda_graphs and not REHEARSAL
    model = make(torch.float32)
    ids = prompts(model.config.vocab_size)
    wanted = tokens_of(model, ids, NEW_TOKENS)
    settings = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with pagedkv.Engine(model, compile=compile, cuda_graphs=cuda_graphs, **settings) as engine:
        _assert_same(run_engine(engine, ids, NEW_TOKENS), wanted)
    return {"prompts": len(ids), "tokens": NEW_TOKENS}


def check_patch(compile: bool) -> dict[str, Any]:
    import pagedkv

    model = make(torch.float32)
    ids = prompts(model.config.vocab_size)
    wanted = tokens_of(model, ids, NEW_TOKENS)
    with pagedkv.patched(model, num_blocks=NUM_BLOCKS, compile=compile):
        _assert_same(tokens_of(model, ids, NEW_TOKENS), wanted)
    return {"prompts": len(ids), "tokens": NEW_TOKENS}
