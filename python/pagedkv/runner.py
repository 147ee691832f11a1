"""Runs a transformers model over a packed batch: the tokens of many sequences in one row, from static buffers.

A forward gets input ids and positions [1, T], and each attention layer the block table, slots and lengths of its group.
Forwards of one token per sequence are padded to a few batch sizes (buckets), so that compiled code and captured CUDA
graphs exist before the first request comes; padding is a sequence of length 0 whose slot is -1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from .block_table import BlockTable
from .errors import InvalidArgumentError
from .hf.cache import PagedCache
from .hf.layers import PAGED
from .hf.methods import Patch
from .hf.pool import Pool
from .hf.prefix import dependence
from .hf.sizing import blocks_for
from .hf.state import PagedState, Step
from .hf.support import check_model, evaluation, refuse
from .hf.tags import TAG
from .progress import track

_PROBE_BLOCKS = 8
_PROBE_LENGTHS = (7, 4)  # over one block and within one, at the probe's block size of 4
_PROBE_CHUNK = 3


class PackedState(PagedState):
    """The state of a cache whose forwards are one row of many sequences; the runner fills the steps itself."""

    def __init__(self, pool: Pool, layers: Sequence[Any], steps: dict[tuple[int, torch.device], Step]) -> None:
        super().__init__(pool, layers)
        self.steps = steps

    def step(self, group: int, device: torch.device) -> Step:
        if (group, device) not in self.steps:
            raise NotImplementedError(f"its layers are on several devices ({device} and others)")
        return self.steps[group, device]

    def plan(self, attention_mask: Tensor | None, batch: int, query_length: int, dense: bool = False) -> None:
        if dense or batch != 1 or query_length != self.query_length:
            raise NotImplementedError("its attention is more than causal and windowed, or does not follow position_ids")


class Runner:
    """A model, its blocks, and the buffers that its forwards read.

    Args: those of :class:`pagedkv.Engine`.

    Attributes:
        pool, tables: the blocks, and one :class:`BlockTable` per group of layers; row r is the r-th running sequence.
        buckets: batch sizes of decode forwards.
        max_length: positions that the model and the tables have.

    Raises:
        UnsupportedModelError: a token's result depends on more than the tokens before it, its position and their keys
            and values, or the model's logits over blocks are not its own; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int | None,
        memory: int | float | None,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        kv_dtype: torch.dtype | None,
        watermark: float,
        num_host_blocks: int,
        compile: bool,
        cuda_graphs: bool | str,
        buckets: Sequence[int] | None,
        progress: bool,
    ) -> None:
        check_model(model)
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.patch = Patch(model, {"block_size": block_size, "kv_dtype": kv_dtype})
        parameters = inspect.signature(model.forward).parameters
        for name in ("position_ids", "attention_mask", self.patch.cache_name):
            if name not in parameters:
                raise refuse(model, f"its forward has no argument {name}")
        if not self.patch.switches:
            raise refuse(model, "its attention does not look its function up by config._attn_implementation")
        self._keeps_logits = "logits_to_keep" in parameters
        text = model.config.get_text_config(decoder=True)
        self.max_length: int = getattr(text, "max_position_embeddings", None) or 1 << 20
        self.buckets = _buckets(max_num_seqs, buckets)
        self._call: Callable[..., Any] = functools.partial(torch.nn.Module.__call__, model)
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self._compiled: Callable[..., Any] | None = None
        self._allocate(_PROBE_BLOCKS, max(max_num_seqs, 2), max(max_num_batched_tokens, 2 * _PROBE_CHUNK), 4, kv_dtype)
        with evaluation(model):
            self._masks = self._make_masks()
            self._probe()
        bytes_per_token = self.pool.block_bytes // self.pool.block_size
        blocks = num_blocks or blocks_for(bytes_per_token * block_size, memory, self.device)
        options = {"prefix_caching": prefix_caching, "watermark": watermark, "num_host_blocks": num_host_blocks}
        self._allocate(blocks, max_num_seqs, max_num_batched_tokens, block_size, kv_dtype, **options)
        self.max_length = min(self.max_length, self.pool.table_width * block_size)
        self._warm_up(self.buckets[0])  # the layers get their tensors before anything is traced
        if compile:
            self._compile(progress)
        if cuda_graphs is True and self.device.type != "cuda":
            raise InvalidArgumentError(f"cuda_graphs: expected a model on CUDA, got one on {self.device}")
        if cuda_graphs and self.device.type == "cuda":
            self._capture(progress)

    # Set-up.

    def _allocate(
        self, num_blocks: int, max_num_seqs: int, max_num_tokens: int, block_size: int, kv_dtype: Any, **options: Any
    ) -> None:
        """The pool, a cache whose layers write to it, and the static buffers."""
        config = self.model.config
        cache = PagedCache(config, num_blocks=2, block_size=block_size)
        reason = dependence(self.model, cache)
        if reason is not None:
            raise refuse(self.model, reason)
        windows = cache.pool.windows
        self.pool = Pool(num_blocks, block_size, windows, max_length=self.max_length, kv_dtype=kv_dtype, **options)
        width = self.pool.table_width
        self.tables = [BlockTable(max_num_seqs, width, max_num_tokens, block_size, device=self.device) for _ in windows]
        self._steps = {(group, self.device): Step() for group in range(len(windows))}
        self._state = PackedState(self.pool, cache.state.layers, self._steps)
        cache._bind(self._state)
        for layer in self._state.layers:
            layer.mode = PAGED
        self._cache = cache
        host = torch.zeros((2, max_num_tokens), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._host_tokens = host
        self._tokens: npt.NDArray[np.int64] = host.numpy()  # ids, positions
        self._device_tokens = host if self.device.type == "cpu" else torch.zeros_like(host, device=self.device)
        self._inputs = {size: self._views(size) for size in self.buckets}

    def _views(self, size: int) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor, Tensor]:
        """What a decode forward of a bucket reads: (slots, table, lengths) per group, ids and positions."""
        groups = []
        for table in self.tables:
            tensors = table.tensors
            groups.append((tensors["slot_mapping"][:size], tensors["block_table"][:size], tensors["seq_lens"][:size]))
        ids, positions = self._device_tokens[0, None, :size], self._device_tokens[1, None, :size]
        return groups, ids, positions

    def _make_masks(self) -> Any:
        """The model's masks; they are markers that hold for every forward, so they are made once."""
        embeds = torch.empty((1, 1, 1), device=self.device, dtype=self.model.dtype)
        with self.patch.attention():
            self._state.query_length = self._state.forward_length = 1
            masks = create_masks_for_generate(self.model.config, embeds, None, self._cache)
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            if getattr(mask, TAG, None) is None:
                raise refuse(self.model, "its attention mask is more than causal and windowed")
        return masks

    def _probe(self) -> None:
        """Compares a packed and chunked forward with the model's own, token by token."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        prompts = [[(7 * i + 5 + 3 * n) % vocabulary for i in range(n)] for n in _PROBE_LENGTHS]
        try:
            own = [self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False) for ids in prompts]
            expected = [output.logits[0].double() for output in own]
            got = self._run_probe(prompts)
        except NotImplementedError as error:
            raise refuse(self.model, str(error)) from error
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise refuse(self.model, f"a packed forward fails ({type(error).__name__}: {error})") from error
        is_exact = self.model.dtype == torch.float32 and self.pool.kv_dtype in (None, torch.float32)
        limit = 1e-3 if is_exact else 0.1
        for row, position, logits in got:
            difference = float((expected[row][position] - logits.double()).norm() / expected[row][position].norm())
            if not difference < limit:
                text = f"its logits in a packed batch differ from its own by {difference:.1e} (relative)"
                raise refuse(self.model, text)

    def _run_probe(self, prompts: list[list[int]]) -> list[tuple[int, int, Tensor]]:
        """(row, position, logits) of the last token of every chunk."""
        manager, done, results = self.pool.manager, [0] * len(prompts), []
        for row, ids in enumerate(prompts):
            manager.add(row, ids)
        while any(done[row] < len(ids) for row, ids in enumerate(prompts)):
            counts = [min(_PROBE_CHUNK, len(ids) - done[row]) for row, ids in enumerate(prompts)]
            for row, count in enumerate(counts):
                manager.allocate_slots(row, count)
                for table, blocks in zip(self.tables, manager.block_ids(row), strict=True):
                    table.set_row(row, blocks)
            ids = [token for row, count in enumerate(counts) for token in prompts[row][done[row] : done[row] + count]]
            ends = np.cumsum(counts) - 1
            active = [row for row, count in enumerate(counts) if count]
            logits = self.run(ids, done, counts, ends[active])
            for row, count in enumerate(counts):
                manager.commit(row, count)
                done[row] += count
            results += [(row, done[row] - 1, logits[i]) for i, row in enumerate(active)]
        return results

    def _compile(self, progress: bool) -> None:
        """One graph per bucket. On CPU the weights are frozen into it, which packs them for the matrix products.

        Freezing takes every tensor that is marked as a static address for a constant, but for those that the graph
        writes (the blocks): the buffers of `_views` must not be marked.
        """
        self._compiled = torch.compile(self._call, fullgraph=True, dynamic=False)
        freeze = self.device.type == "cpu"
        for size in track(self.buckets, "compiling decode", progress):
            with ExitStack() as stack:
                stack.enter_context(torch._inductor.config.patch(freezing=freeze))
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=len(self.buckets) + 1))
                self._warm_up(size)

    def _capture(self, progress: bool) -> None:
        """A CUDA graph per bucket, the largest first: the smaller ones share its memory."""
        memory = torch.cuda.graph_pool_handle()
        for size in track(sorted(self.buckets, reverse=True), "capturing decode", progress):
            self._warm_up(size)
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), self.patch.attention(), torch.cuda.graph(graph, pool=memory):
                logits = self._decode(size)
            self._graphs[size] = (graph, logits)

    def _warm_up(self, size: int) -> None:
        """A forward of nothing but padding."""
        for table in self.tables:
            table.fill([])
            table.upload()
        with torch.inference_mode(), self.patch.attention():
            self._decode(size)

    # A forward.

    def run(
        self,
        token_ids: Sequence[int],
        num_computed: Sequence[int],
        num_new: Sequence[int] | None,
        logits_at: Sequence[int] | npt.NDArray[np.int64] | None,
    ) -> Tensor:
        """One forward of the first len(num_computed) rows.

        Args:
            token_ids: [T] ids, sequence after sequence.
            num_computed: tokens whose keys are written, per row. num_new: tokens of this forward; None: one each.
            logits_at: indices into token_ids; None, for one token each: all of them.

        Returns:
            [len(logits_at), vocabulary] float32.
        """
        num_seqs, total = len(num_computed), len(token_ids)
        for table in self.tables:
            table.fill(num_computed, num_new)
            table.upload(num_seqs)
        size = total if num_new is not None else next(size for size in self.buckets if size >= num_seqs)
        computed = np.asarray(num_computed, np.int64)
        self._tokens[0, :total] = token_ids
        if num_new is None:
            self._tokens[1, :total] = computed
            self._tokens[:, total:size] = 0
        else:
            starts = np.cumsum(num_new) - num_new
            self._tokens[1, :total] = np.arange(total) + np.repeat(computed - starts, num_new)
        if self._device_tokens is not self._host_tokens:
            self._device_tokens[:, :size].copy_(self._host_tokens[:, :size])  # the next step writes the host side again
        if num_new is None:
            return self._run_decode(size)[:num_seqs].float()
        with self.patch.attention():
            return self._forward(
                num_seqs, total, torch.as_tensor(np.asarray(logits_at, np.int64), device=self.device)
            ).float()

    def _run_decode(self, size: int) -> Tensor:
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
            return logits
        with self.patch.attention():
            return self._decode(size)

    def _decode(self, size: int) -> Tensor:
        """[size, vocabulary] logits of one token per row."""
        groups, ids, positions = self._inputs[size]
        for step, views in zip(self._steps.values(), groups, strict=True):
            step.slot_mapping, step.block_table, step.seq_lens = views
            step.cu_seqlens_q = None
        call = self._call if self._compiled is None else self._compiled
        return self._logits(call, size, input_ids=ids, position_ids=positions)

    def _forward(self, num_seqs: int, total: int, logits_at: Tensor) -> Tensor:
        for step, table in zip(self._steps.values(), self.tables, strict=True):
            tensors = table.tensors
            step.slot_mapping, step.block_table = tensors["slot_mapping"][:total], tensors["block_table"][:num_seqs]
            step.seq_lens, step.cu_seqlens_q = tensors["seq_lens"][:num_seqs], tensors["cu_seqlens_q"][: num_seqs + 1]
        ids, positions = self._device_tokens[0, None, :total], self._device_tokens[1, None, :total]
        if self._keeps_logits:
            return self._logits(self._call, total, input_ids=ids, position_ids=positions, logits_to_keep=logits_at)
        return self._logits(self._call, total, input_ids=ids, position_ids=positions)[logits_at]

    def _logits(self, call: Callable[..., Any], query_length: int, **inputs: Tensor) -> Tensor:
        self._state.query_length = self._state.forward_length = query_length
        for step in self._steps.values():
            step.query_length = query_length
        for layer in self._state.layers:
            layer.done = False
        cache = {self.patch.cache_name: self._cache}
        return call(attention_mask=self._masks, use_cache=True, **cache, **inputs).logits[0]  # type: ignore[no-any-return]


def _buckets(max_num_seqs: int, buckets: Sequence[int] | None) -> list[int]:
    """Powers of two up to the most sequences, unless given."""
    if buckets is None:
        sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
        return [*sizes, max_num_seqs]
    sizes = sorted(set(buckets))
    if not sizes or sizes[0] < 1 or sizes[-1] != max_num_seqs:
        raise InvalidArgumentError(f"buckets: expected sizes from 1 to max_num_seqs ({max_num_seqs}), got {sizes}")
    return sizes
