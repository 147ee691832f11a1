"""Arguments of an engine that are refused by name before its model is used."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InvalidArgumentError, boolean, integer, refused
from ..hf.sizing import check_settings, total_memory
from ..hf.support import base_model, check_inputs_are_ids


def inner_model(model: Any) -> PreTrainedModel:
    """The transformers model that an engine runs: what compiled modules and adapter models are around.

    Raises:
        InvalidArgumentError: it is no module, or has no transformers config.
        UnsupportedModelError: an adapter puts vectors before the prompt, which would be left out.
    """
    inner = base_model(model)
    if not isinstance(inner, torch.nn.Module) or not isinstance(getattr(inner, "config", None), PreTrainedConfig):
        raise InvalidArgumentError(f"model: expected a transformers model, got {type(model).__name__}")
    check_inputs_are_ids(model)
    return inner


def check_tokenizer(tokenizer: Any) -> None:
    """Raises InvalidArgumentError for what neither encodes nor decodes."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise refused("tokenizer", "a transformers tokenizer or None", tokenizer)


def check_batch(max_num_seqs: Any, max_num_batched_tokens: Any) -> tuple[int, int]:
    """Both as ints; raises InvalidArgumentError unless a forward has room for a token of every sequence."""
    seqs = integer("max_num_seqs", max_num_seqs)
    tokens = integer("max_num_batched_tokens", max_num_batched_tokens)
    if not 1 <= seqs <= tokens:
        names = "max_num_seqs, max_num_batched_tokens"
        raise refused(names, "1 <= max_num_seqs <= max_num_batched_tokens", (seqs, tokens))
    return seqs, tokens


def check_buffers(num_seqs: int, num_tokens: int, table_width: int, num_groups: int, device: torch.device) -> None:
    """Raises InvalidArgumentError where the static buffers of a forward need more than a device has."""
    words = 2 * num_tokens + num_groups * (num_tokens + num_seqs * (table_width + 2) // 2)  # of 8 bytes
    total = total_memory(device)
    if 8 * words > total:
        names, got = "max_num_seqs, max_num_batched_tokens", f"{num_seqs}, {num_tokens} ({8 * words} bytes)"
        raise InvalidArgumentError(f"{names}: expected buffers of at most the {total} bytes of {device}, got {got}")


def check_pool(
    num_blocks: Any, memory: Any, block_size: Any, num_host_blocks: Any, kv_dtype: Any, watermark: Any
) -> None:
    """Raises InvalidArgumentError for what can not size, type or keep free the blocks of any model."""
    check_settings(block_size, num_blocks, memory, kv_dtype)
    integer("num_host_blocks", num_host_blocks, 0)
    if isinstance(watermark, bool) or not isinstance(watermark, int | float) or not 0 <= watermark < 1:
        raise refused("watermark", "a fraction in [0, 1)", watermark)


def check_flags(cuda_graphs: Any, device: torch.device, **flags: Any) -> None:
    """Raises InvalidArgumentError for a flag that is no bool, and for CUDA graphs on another device."""
    for name, value in flags.items():
        boolean(name, value)
    if not isinstance(cuda_graphs, bool) and cuda_graphs != "auto":
        raise refused("cuda_graphs", "True, False or 'auto'", cuda_graphs)
    if cuda_graphs is True and device.type != "cuda":
        raise InvalidArgumentError(f"cuda_graphs: expected a model on CUDA, got one on {device}")
