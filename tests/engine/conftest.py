"""A tiny model, and engines over it whose accounts are checked when a test ends."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pagedkv
from pagedkv.engine import compiling


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny matrices are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build_llama(**changes):
    """Float32 weights large enough that greedy tokens vary and near-ties are rare."""
    torch.manual_seed(0)
    options = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**options | changes)).eval()


@pytest.fixture(scope="session")
def llama():
    """One that no test changes."""
    model = build_llama()
    object.__setattr__(model, "known", {})  # its native tokens, see the oracle
    return model


@pytest.fixture
def untuned(monkeypatch):
    """Compile without the search for the fastest matrix products, which takes most of the time."""
    monkeypatch.setitem(compiling._CPU_OPTIONS, "max_autotune_gemm", False)


@pytest.fixture
def make_engine():
    """Makes engines; afterwards each must be consistent, and hold no block once it is closed."""
    engines = []

    def make(model, tokenizer=None, **options):
        settings = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        engine = pagedkv.Engine(model, tokenizer, **settings | options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()
        engine.check_integrity()
        assert engine.manager.num_free_blocks == engine.manager.pool.num_usable
        assert engine.manager.stats().num_used_host_blocks == 0
