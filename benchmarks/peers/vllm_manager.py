"""vLLM's own KVCacheManager, BlockPool and BlockTable behind the few calls that the manager benchmark makes."""

from __future__ import annotations

import os
from collections.abc import Sequence

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.worker.block_table import BlockTable

VERSION = vllm.__version__


class VllmManager:
    """Requests by name; decode steps include the table rows and slots that its model runner prepares."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        init_none_hash(sha256)
        current_platform.register_triton_kernel_overrides()
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            config, max_model_len=max_model_len, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._sampling = SamplingParams(max_tokens=max_model_len)
        self.requests: dict[int, Request] = {}
        self.table = BlockTable(
            block_size, max_num_seqs, max_model_len // block_size, max_num_seqs, False, torch.device("cpu"), 1
        )
        self._offsets = torch.arange(max_num_seqs + 1, dtype=torch.int32)

    def admit(self, name: int, token_ids: list[int]) -> None:
        """Hashes, looks up and allocates a whole prompt."""
        request = Request(str(name), token_ids, self._sampling, None, block_hasher=self._hasher)
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        granted = self.manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)
        assert granted is not None
        request.num_computed_tokens = request.num_tokens
        self.requests[name] = request
        self.num_cached = num_cached

    def fill_rows(self, names: Sequence[int]) -> None:
        for row, name in enumerate(names):
            self.table.add_row(self.manager.get_block_ids(str(name))[0], row)
        self.lengths = np.array([self.requests[name].num_computed_tokens for name in names])

    def decode_step(self, names: Sequence[int], token_ids: Sequence[int]) -> None:
        manager, table = self.manager, self.table
        for row, name in enumerate(names):
            request = self.requests[name]
            request.append_output_token_ids(token_ids[row])
            granted = manager.allocate_slots(request, 1)
            assert granted is not None
            request.num_computed_tokens += 1
            new_ids = granted.get_block_ids(allow_none=True)
            if new_ids is not None:
                table.append_row(new_ids[0], row)
        table.commit_block_table(len(names))
        positions = torch.from_numpy(self.lengths)
        table.compute_slot_mapping(len(names), self._offsets[: len(names) + 1], positions)
        self.lengths = self.lengths + 1

    def slots(self, count: int) -> list[int]:
        return self.table.slot_mapping.gpu[:count].tolist()

    def free(self, names: Sequence[int]) -> None:
        for name in names:
            self.manager.free(self.requests.pop(name))

    @property
    def num_free_blocks(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()
