"""The settings of an engine: each is checked here, once, and trusted by what takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InvalidArgumentError, boolean, integer, listed, refused
from ..hf.pool_size import check_settings
from ..hf.refusals import base_model, check_inputs_are_ids


@dataclass(slots=True)
class EngineConfig:
    """Sizes and ways of an engine.

    Args:
        num_blocks: blocks of the pool, the null block included.
        memory: in place of it, bytes of the pool, or the fraction of free memory.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one forward.
        prefix_caching: prompts that begin like an earlier one reuse its blocks.
        compile: through torch.compile. On CPU every forward, with a frozen copy of the weights laid out for it; a
            model of 30 layers takes about 100 s. On CUDA decode.
        cuda_graphs: decode from captured graphs. True, False, or "auto": where the model is on CUDA, and eagerly after
            a warning where an op of it can not be captured.
        kv_dtype: type of the stored keys and values, as in :func:`pagedkv.patch`.
        watermark: fraction of the blocks that admissions leave free.
        num_host_blocks: preemption swaps to so many blocks of host memory instead of computing again.
        buckets: batch sizes that decode forwards are padded to, the last being max_num_seqs; None: powers of two.
        progress: show bars while decode is compiled or captured.

    Raises:
        InvalidArgumentError: a setting of a wrong type, or out of its range.
    """

    num_blocks: int | None = None
    memory: int | float | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    compile: bool = False
    cuda_graphs: bool | str = "auto"
    kv_dtype: torch.dtype | str | None = None
    watermark: float = 0.01
    num_host_blocks: int = 0
    buckets: Sequence[int] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        self.max_num_seqs = integer("max_num_seqs", self.max_num_seqs, 1)
        tokens, note = self.max_num_batched_tokens, " (max_num_seqs: each may decode one)"
        self.max_num_batched_tokens = integer("max_num_batched_tokens", tokens, self.max_num_seqs, note)
        sizes = self.block_size, self.num_blocks, self.memory
        self.block_size, self.num_blocks, self.kv_dtype = check_settings(*sizes, self.kv_dtype)
        self.num_host_blocks = integer("num_host_blocks", self.num_host_blocks, 0)
        fraction = self.watermark
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise refused("watermark", "a fraction in [0, 1)", fraction)
        for name in ("prefix_caching", "compile", "progress"):
            boolean(name, getattr(self, name))
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs != "auto":
            raise refused("cuda_graphs", "True, False or 'auto'", self.cuda_graphs)
        self.buckets = self._checked_buckets()

    def _checked_buckets(self) -> list[int]:
        """Powers of two up to the most sequences, unless given."""
        most = self.max_num_seqs
        if self.buckets is None:
            return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
        sizes = sorted({integer("buckets", size) for size in listed("buckets", self.buckets, "a sequence of sizes")})
        if not sizes or sizes[0] < 1 or sizes[-1] != most:
            raise refused("buckets", f"sizes from 1 to max_num_seqs ({most})", sizes)
        return sizes

    def check_device(self, device: torch.device) -> None:
        """Refuse what a device can not do."""
        if self.cuda_graphs is True and device.type != "cuda":
            raise InvalidArgumentError(f"cuda_graphs: expected a model on CUDA, got one on {device}")


def inner_model(model: Any) -> PreTrainedModel:
    """The transformers model that an engine runs: what compiled modules and adapter models are around.

    Raises:
        InvalidArgumentError: it is no module, has no transformers config, or is in training mode.
        UnsupportedModelError: an adapter puts vectors before the prompt, which would be left out.
    """
    inner = base_model(model)
    if not isinstance(inner, torch.nn.Module) or not isinstance(getattr(inner, "config", None), PreTrainedConfig):
        raise InvalidArgumentError(f"model: expected a transformers model, got {type(model).__name__}")
    check_inputs_are_ids(model)
    check_mode(inner)
    return inner


def check_mode(model: torch.nn.Module) -> None:
    """Refuse a model whose forward is not that of inference."""
    if model.training:
        raise InvalidArgumentError("model: expected one in evaluation mode, call model.eval()")


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what neither encodes nor decodes."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise refused("tokenizer", "a transformers tokenizer or None", tokenizer)
