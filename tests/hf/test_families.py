"""docs/FAMILIES.md against a fresh run of a sample; the whole table is written by families.py."""

from __future__ import annotations

import pytest
import transformers
from families import TABLE, families, read_table, run_quietly

# one per way of being served or refused
SAMPLE = [
    "bloom",  # attention that bypasses the interface
    "cohere2",  # sliding and full layers
    "deepseek_v3",  # keys are expanded after the cache
    "doge",  # a mask of its own
    "falcon_h1",  # attention and mamba in one layer
    "gemma2",  # softcaps
    "gemma4_text",  # layers that share keys
    "gpt2",
    "gpt_oss",  # sinks
    "lfm2",  # convolutions
    "llama4_text",  # chunked attention
    "mamba",  # no attention at all
    "moshi",  # sees what its own cache happens to keep
    "openai-gpt",  # no cache
    "phi3",
    "qwen2_moe",
    "qwen3_next",  # linear attention
    "starcoder2",
]
same_version = pytest.mark.skipif(
    f" {transformers.__version__}," not in TABLE.read_text(), reason="docs/FAMILIES.md is of another transformers"
)


def test_table_is_complete():
    table = read_table()
    if transformers.__version__.startswith("5.24"):
        assert sorted(table) == families()
    kinds = [kind for kind, _ in table.values()]
    assert "WRONG" not in kinds
    assert kinds.count("paged") + kinds.count("gathered") >= 120


@same_version
@pytest.mark.parametrize("family", SAMPLE)
def test_family(family):
    row = run_quietly(family)
    assert (row.kind, row.note) == read_table()[family]
