"""Runs a transformers model over a packed batch: the tokens of many sequences in one row, from static buffers.

A forward gets input ids and positions [1, T], and what its attention layers read of the block tables (`INDICES`).
Forwards of one token per sequence are padded to a few batch sizes (buckets), so that captured CUDA graphs exist before
the first request comes; padding is a sequence of length 0, or a token whose slot is -1. Compiled code serves any T: on
CPU one graph is every forward.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

import pagedkv_ops

from ..hf.cache import PagedCache, group_windows
from ..hf.capturing import capture, warn_uncaptured
from ..hf.handle import Patch
from ..hf.kv_pool import Pool, sized
from ..hf.probe import Probe, checked_attention, evaluation
from ..hf.refusals import UnsupportedModelError, check_model, failed, refuse
from ..hf.reuse import dependence
from ..hf.tags import TAG
from ..tensor_parallel import agreed_blocks, mesh_of
from ..transfers import current
from .batch import Batch
from .buffers import Buffers, Inputs
from .cache import EngineCache
from .compiling import compiled
from .config import EngineConfig

logger = logging.getLogger(__name__)

_PROBE_BLOCKS, _PROBE_BLOCK_SIZE = 16, 4  # blocks of each group of layers
_PROBE_CHUNK = 3  # prompts of 6 and 4 tokens come in two forwards, over one block and within one
_TRACED_TOKENS = 16  # kernels are chosen for so many: decode of few sequences is what waits for the weights
_MIN_TOKENS = 2  # of a compiled forward: Dynamo takes sizes of 1 for constants

Forward = Callable[[Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]


class Runner:
    """A model, its blocks, and the buffers that its forwards read.

    Attributes:
        pool, tables: the blocks, and one :class:`BlockTable` per group of layers; row r is the r-th running sample.
        max_length: positions that the model and the tables have.
        is_frozen: forwards are compiled or captured. not_frozen: the parts of the model's identity that they follow.

    Raises:
        UnsupportedModelError: a token's result depends on more than the tokens before it, its position and their keys
            and values, or the model's logits over blocks are not its own; the message says why.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        check_model(model)
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        config.check_device(self.device)
        self.config = config
        self.patch = Patch(model, {"block_size": config.block_size, "kv_dtype": config.kv_dtype})
        self._call = self._model_call(self._check_forward())
        text = model.config.get_text_config(decoder=True)
        self.max_length: int = getattr(text, "max_position_embeddings", None) or 1 << 20
        self._compiled: Forward | None = None
        self._is_one_graph = False  # decode and prompts are the same compiled code
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self.not_frozen = () if self.device.type == "cpu" else ("writes", "values")  # read where they are
        probe = self._accept()
        sizes = config.num_blocks, config.memory, config.block_size, self.device, config.num_host_blocks
        self._allocate(replace(config, num_blocks=agreed_blocks(model, lambda: sized(self.pool, *sizes)), memory=None))
        self.max_length = min(self.max_length, self.pool.table_width * config.block_size)
        with current(self.device):
            self._compile_kernels()
            if config.compile:
                self._compile(probe, is_one_graph=self.device.type == "cpu")
        if config.cuda_graphs and self.device.type == "cuda":
            self._capture()
        self.is_frozen = config.compile or bool(self._graphs)

    # Set-up.

    def _check_forward(self) -> bool:
        """Refuse a model whose forward can not be told what a packed batch is; whether it takes logits_to_keep."""
        parameters = inspect.signature(self.model.forward).parameters
        for name in ("position_ids", "attention_mask", self.patch.cache_name):
            if name not in parameters:
                raise refuse(self.model, f"its forward has no argument {name}")
        if not any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            raise refuse(self.model, "its forward takes no arguments for its attention layers")
        if not self.patch.switches:
            raise refuse(self.model, "its attention does not look its function up by config._attn_implementation")
        return "logits_to_keep" in parameters

    def _accept(self) -> Probe:
        """Compare forwards over a few small blocks with the model's own."""
        small = EngineConfig(
            num_blocks=_PROBE_BLOCKS * len(group_windows(self.model.config)),
            block_size=_PROBE_BLOCK_SIZE,
            max_num_seqs=max(self.config.max_num_seqs, 2),
            max_num_batched_tokens=max(self.config.max_num_batched_tokens, 2 * _PROBE_CHUNK),
            prefix_caching=False,
            kv_dtype=self.config.kv_dtype,
        )
        self._allocate(small)
        with evaluation(self.model):
            self._masks = self._make_masks()
            return self._probe()

    def _allocate(self, config: EngineConfig) -> None:
        """The pool, a cache whose layers write to it, and the static buffers."""
        cache = PagedCache(self.model.config, num_blocks=2, block_size=config.block_size)
        reason = dependence(self.model, cache)
        if reason is not None:
            raise refuse(self.model, reason)
        assert config.num_blocks is not None
        self.pool = Pool(
            config.num_blocks,
            config.block_size,
            cache.pool.windows,
            max_length=self.max_length,
            kv_dtype=config.kv_dtype,
            prefix_caching=config.prefix_caching,
            watermark=config.watermark,
            num_host_blocks=config.num_host_blocks,
        )
        self._buffers = Buffers(self.pool, config.max_num_seqs, config.max_num_batched_tokens, self.device)
        self.tables = self._buffers.tables
        self.cache = EngineCache(cache, self.pool, self.device)
        self._bind_decode(config.buckets)

    def _bind_decode(self, buckets: Sequence[int] | None) -> None:
        """The inputs of decode forwards, per bucket."""
        self._inputs = {}
        for size in buckets or ():
            if self._is_one_graph:
                size = max(size, _MIN_TOKENS)
                self._inputs[size] = self._buffers.views(size, None, torch.arange(size, device=self.device))
            else:
                self._inputs[size] = self._buffers.views(size, size)
        self._sizes = sorted(self._inputs)

    def _model_call(self, keeps_logits: bool) -> Forward:
        def forward(ids: Tensor, positions: Tensor, logits_at: Tensor | None, indices: dict[str, Any]) -> Tensor:
            """[1, T] ids and positions -> [L, vocabulary] float32."""
            arguments = {"attention_mask": self._masks, self.patch.cache_name: self.cache, **indices}
            if keeps_logits and logits_at is not None:
                arguments["logits_to_keep"] = logits_at
            output = torch.nn.Module.__call__(
                self.model, input_ids=ids, position_ids=positions, use_cache=True, **arguments
            )
            logits: Tensor = output.logits[0]
            return (logits if keeps_logits or logits_at is None else logits[logits_at]).float()

        return forward

    def _make_masks(self) -> Any:
        """The model's masks; they are markers that hold for every forward, so they are made once."""
        embeds = torch.empty((1, 1, 1), device=self.device, dtype=self.model.dtype)
        masks = self.patch.run(create_masks_for_generate, self.model.config, embeds, None, self.cache)
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            if getattr(mask, TAG, None) is None:
                raise refuse(self.model, "its attention mask is more than causal and windowed")
        return masks

    def _probe(self) -> Probe:
        """Compare packed, chunked prompts and decode steps with what the model gives by itself."""
        model, dtype = self.model, self.pool.kv_dtype
        probe = Probe(model, functools.partial(type(model).generate, model), self.patch.cache_name, dtype)
        try:
            with checked_attention(model, self.cache.paged):
                for step, logits in enumerate(self._run_probe(probe)):
                    probe.check(step, logits, "in a packed batch")
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise failed(model, error, "a packed forward fails") from error
        return probe

    def _run_probe(self, probe: Probe) -> Iterator[Tensor]:
        """[rows, vocabulary] logits of each new token of the probe."""
        manager, done = self.pool.manager, [0] * len(probe.prompts)
        tokens = [prompt + new[:-1] for prompt, new in zip(probe.prompts, probe.tokens, strict=True)]
        for row, ids in enumerate(tokens):
            manager.add(row, ids)
        while any(count < len(ids) for count, ids in zip(done, tokens, strict=True)):
            rest = [len(prompt) - count for prompt, count in zip(probe.prompts, done, strict=True)]
            counts = [max(1, min(_PROBE_CHUNK, left)) for left in rest]
            for row, count in enumerate(counts):
                manager.allocate_slots(row, count)
                for table, blocks in zip(self.tables, manager.block_ids(row), strict=True):
                    table.set_row(row, blocks)
            ids = [token for row, count in enumerate(counts) for token in tokens[row][done[row] : done[row] + count]]
            is_decode = len(ids) == len(counts) <= self._sizes[-1]
            logits = self.run(Batch(ids, done, *((None, None) if is_decode else (counts, np.cumsum(counts) - 1))))
            for row, count in enumerate(counts):
                manager.commit(row, count)
                done[row] += count
            if max(rest) <= _PROBE_CHUNK:  # the prompts are complete
                yield logits

    def _compile_kernels(self) -> None:
        """Compile what decode, chunks, mixed steps and copies of blocks can launch on CUDA: nothing is while serving.

        The first forward gives the layers their tensors before anything is traced, and shows how they call attention.
        """
        calls: list[Any] = []
        self.cache.state.calls = calls
        self._warm_up(self._inputs[self._sizes[0]])
        self.cache.state.calls = None
        config, kinds = self.config, dict[Any, Any]()
        for key_cache, value_cache, query, options in calls:
            caches = ((cache.shape, cache.stride(), cache.dtype) for cache in (key_cache, value_cache))
            plain = [
                (name, (value.shape, value.stride()) if isinstance(value, Tensor) else value)
                for name, value in options.items()
            ]
            kind = *caches, query.shape[1], query.dtype, *plain
            kinds.setdefault(kind, (key_cache, value_cache, query, options))
        for key_cache, value_cache, query, options in kinds.values():
            pagedkv_ops.warm_up(
                key_cache,
                value_cache,
                num_heads=query.shape[1],
                max_batch=config.max_num_seqs,
                max_tokens=config.max_num_batched_tokens,
                max_blocks=self.pool.table_width,
                dtype=query.dtype,
                **options,
            )
        self.pool.warm_up()

    def _compile(self, probe: Probe, is_one_graph: bool) -> None:
        """One graph for any number of tokens: on CPU of every forward, on CUDA of decode (one more for a batch of 1).

        Freezing takes every tensor that is marked as a static address for a constant, but for those that the graph
        writes (the blocks): the buffers must not be marked.
        """
        self._compiled, options = compiled(self._call, is_frozen=is_one_graph and mesh_of(self.model) is None)
        self._is_one_graph = is_one_graph
        self._bind_decode(self.config.buckets)
        size = min(_TRACED_TOKENS, self._buffers.num_tokens)
        if is_one_graph:
            traced = [self._buffers.views(size, None, self._buffers.logits_at[: size // 2])]
        else:
            traced = [self._inputs[size] for size in dict.fromkeys((self._sizes[-1], self._sizes[0]))]
        for inputs in tqdm(traced, "compiling", disable=not self.config.progress):
            with options:
                inputs.mark_dynamic()
                self._warm_up(inputs)
        if is_one_graph:
            self._check_compiled(probe)

    def _check_compiled(self, probe: Probe) -> None:
        """Compare a compiled forward of a few tokens in block 1, which nobody has yet, with the eager one.

        Both are roundings of the same logits: on SmolLM2-135M in bfloat16 the compiled ones were 0.03 from those in
        float32, the eager ones 0.16.
        """
        count = min(_MIN_TOKENS + 1, self.pool.block_size, self._buffers.num_tokens)
        batch = Batch(list(range(count)), [0], [count], range(count))
        for table in self.tables:
            table.set_row(0, [1])
        call, self._compiled = self._compiled, None
        with torch.inference_mode():
            expected = self.run(batch)
            self._compiled = call
            got = self.run(batch)
        is_exact = self.model.dtype == torch.float32 and self.pool.kv_dtype in (None, torch.float32)
        probe.check_pair(expected, got, "from a compiled forward", 1e-3 if is_exact else 0.5)

    def _capture(self) -> None:
        """A CUDA graph per bucket, the largest first: the smaller ones share its memory. With "auto" none, where an op
        can not be captured."""
        with current(self.device):
            try:
                self._capture_buckets()
            except Exception as error:  # whatever an op raises in a capture
                if self.config.cuda_graphs is True:
                    raise
                warn_uncaptured(logger, error, self._capture_buckets)
                self._graphs.clear()

    def _capture_buckets(self) -> None:
        memory = torch.cuda.graph_pool_handle()
        sizes = [size for size in self._sizes[::-1] if size not in self._graphs]
        for size in tqdm(sizes, "capturing decode", disable=not self.config.progress):
            self._warm_up(self._inputs[size])
            with torch.inference_mode():
                forward = functools.partial(self.patch.run, self._forward, self._inputs[size])
                self._graphs[size] = capture(forward, memory)

    def _warm_up(self, inputs: Inputs) -> None:
        """A forward of nothing but padding."""
        self._buffers.clear()
        with torch.inference_mode():
            self.patch.run(self._forward, inputs)

    # A forward.

    def run(self, batch: Batch) -> Tensor:
        """[len(batch.logits_at), vocabulary] float32: one forward of the first rows of the tables."""
        with current(self.device):
            return self._run(batch)

    def _run(self, batch: Batch) -> Tensor:
        num_seqs, total = len(batch.num_computed), len(batch.token_ids)
        if batch.num_new is None:
            size = next(size for size in self._sizes if size >= num_seqs)
            self._buffers.write(batch, size)
            return self._decode(size)[:num_seqs]
        count = len(batch.logits_at)
        rows, least = (None, _MIN_TOKENS) if self._is_one_graph else (num_seqs, 0)
        size, num_logits = max(total, least), max(count, least)
        self._buffers.write(batch, size, num_logits)
        inputs = self._buffers.views(size, rows, self._buffers.logits_at[:num_logits], decode=False)
        return self.patch.run(self._forward, inputs)[:count]

    def _decode(self, size: int) -> Tensor:
        """[size, vocabulary] logits of one token per row."""
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
            return logits
        return self.patch.run(self._forward, self._inputs[size])

    def _forward(self, inputs: Inputs) -> Tensor:
        is_compiled = self._compiled is not None and (self._is_one_graph or inputs.logits_at is None)
        call = self._compiled if is_compiled else self._call
        return call(inputs.ids, inputs.positions, inputs.logits_at, inputs.indices)  # type: ignore[misc]
