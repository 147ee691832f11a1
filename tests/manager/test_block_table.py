"""The static buffers that a step reads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pagedkv.block_table import BlockTable
from pagedkv.errors import InvalidArgumentError
from pagedkv.manager import KVCacheManager


def test_row_tail():
    table = BlockTable(2, 4, 8, 4)
    table.set_row(0, [5, 6, 7])
    table.fill([9], [3])
    table.set_row(0, [2])
    assert table.fill([0], [3]) == 3
    assert table.block_table[0].tolist() == [2, 0, 0, 0]
    assert table.slot_mapping.tolist() == [8, 9, 10, -1, -1, -1, -1, -1]
    assert table.seq_lens.tolist() == [3, 0]
    assert table.cu_seqlens_q.tolist() == [0, 3, 3]


def test_padded_rows():
    table = BlockTable(4, 3, 8, 4)
    for row in range(4):
        table.set_row(row, [row + 1, row + 11])
    table.fill([5, 6, 7, 4])
    table.fill([5, 6])
    assert table.block_table.tolist() == [[1, 11, 0], [2, 12, 0], [0, 0, 0], [0, 0, 0]]
    assert table.seq_lens.tolist() == [6, 7, 0, 0]
    assert table.slot_mapping.tolist() == [45, 50, -1, -1, -1, -1, -1, -1]
    assert table.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]
    assert table.fill([]) == 0
    assert not table.block_table.any()
    assert (table.slot_mapping == -1).all()


def test_buffers_never_move():
    table = BlockTable(3, 8, 16, 4)
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in table.tensors.items()}
    for step in range(5):
        table.set_row(0, range(1, 3 + step))
        table.fill([step], [2])
        table.upload()
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in table.tensors.items()} == before
    assert {name: tensor.dtype for name, tensor in table.tensors.items()} == {
        "slot_mapping": torch.int64,
        "seq_lens": torch.int32,
        "cu_seqlens_q": torch.int32,
        "block_table": torch.int32,
    }


def test_tensors_show_what_the_host_wrote():
    table = BlockTable(2, 2, 4, 4)
    table.set_row(0, [3, 1])
    table.fill([4], [2])
    table.upload()
    assert table.tensors["block_table"][0].tolist() == [3, 1]
    assert table.tensors["slot_mapping"].tolist() == [4, 5, -1, -1]
    assert table.tensors["slot_mapping"].data_ptr() % 8 == 0


def test_created_inside_inference_mode():
    with torch.inference_mode():
        table = BlockTable(2, 2, 4, 4)
    assert not any(tensor.is_inference() for tensor in table.tensors.values())


def test_slots_of_a_large_pool_need_64_bits():
    table = BlockTable(1, 1, 1, 16)
    table.set_row(0, [2**31 - 1])
    table.fill([7])
    assert table.slot_mapping[0] == (2**31 - 1) * 16 + 7


def test_moving_and_appending_rows():
    table = BlockTable(3, 4, 8, 2)
    table.set_row(0, [1])
    table.set_row(1, [2, 3])
    table.append_row(0, [4])
    table.append_row(0, [])
    table.move_row(1, 0)
    assert table.block_table.tolist() == [[2, 3, 0, 0], [0] * 4, [0] * 4]
    table.move_row(0, 0)
    assert table.row_blocks.tolist() == [2, 0, 0]
    table.set_entries([0, 0, 2], [2, 0, 0], [9, 8, 7])
    assert table.block_table.tolist() == [[8, 3, 9, 0], [0] * 4, [7, 0, 0, 0]]
    assert table.row_blocks.tolist() == [3, 0, 1]
    table.clear_row(0)
    assert not table.block_table[0].any()


def test_mixed_steps_against_a_loop():
    rng = random.Random(0)
    table = BlockTable(8, 10, 60, 3)
    for _ in range(50):
        num_seqs = rng.randint(0, 8)
        computed = [rng.randint(0, 20) for _ in range(num_seqs)]
        new = [rng.randint(0, 7) for _ in range(num_seqs)]
        rows = [[rng.randint(1, 99) for _ in range(-(-(a + b) // 3))] for a, b in zip(computed, new, strict=True)]
        for row, blocks in enumerate(rows):
            table.set_row(row, blocks)
        slots = [
            rows[row][at // 3] * 3 + at % 3
            for row in range(num_seqs)
            for at in range(computed[row], computed[row] + new[row])
        ]
        assert table.fill(computed, np.array(new, np.int32)) == len(slots)
        assert table.slot_mapping.tolist() == slots + [-1] * (60 - len(slots))
        assert table.seq_lens.tolist() == [a + b for a, b in zip(computed, new, strict=True)] + [0] * (8 - num_seqs)
        ends = np.cumsum([0, *new]).tolist()
        assert table.cu_seqlens_q.tolist() == ends + [ends[-1]] * (8 - num_seqs)


def test_with_the_manager_decode_step():
    manager, table = KVCacheManager(50, 4), BlockTable(3, 10, 3, 4)
    for name in range(3):
        manager.add(name, range(name * 10, name * 10 + 7 + name))
        table.set_row(name, manager.allocate_slots(name).block_ids)
        manager.commit(name, 7 + name)
    lengths = np.array([7, 8, 9])
    for _ in range(12):
        step = manager.append_step(range(3), [1, 2, 3])
        table.set_entries(*step.entries[0])
        table.fill(lengths)
        expected = [manager.block_ids(name)[length // 4] * 4 + length % 4 for name, length in enumerate(lengths)]
        assert table.slot_mapping.tolist() == expected
        manager.commit_step(range(3))
        lengths += 1
        for name in range(3):
            blocks = manager.block_ids(name)
            assert table.block_table[name, : len(blocks)].tolist() == blocks


MISUSES = """
    set_row(2, [1]); set_row(-1, [1]); set_row(0, [1, 2, 3, 4]); set_row(0, [1.7, 2]); set_row(0, [-1]);
    set_row(0, [2**31]); set_row(0, np.array([2**32 + 5])); set_row(0, np.array([1, -7], np.int32));
    set_row(0, [2**70]); set_row(0, [True]); set_row(0, ['x']); set_row(0, [[1], [2, 3]]); set_row(0, [[1, 2]]);
    set_row(0, 5); append_row(1, [1.7]); append_row(1, [-1]); append_row(0, [1, 2]); append_row(2, [1]);
    set_entries([0, 2], [0, 0], [1, 1]); append_row(1, 5); set_entries([0], [3], [1]); set_entries([0], [0], [-1]);
    set_entries([0, 1], [0, 0], [1.5, 2]); set_entries([0, 1], [0, 0], [7]); set_entries([0, 1], [0, 0], 7);
    move_row(2, 0); move_row(0, 2); fill([0, 0, 0]); fill([0], [1, 1]); fill([0], [7]); fill([0], [-1]);
    fill([-1], [1]); fill([8]); fill([0, 0], [4, 3])
"""


@pytest.mark.parametrize("call", [call.strip() for call in MISUSES.split(";")])
def test_misuse_changes_nothing(call):
    table = BlockTable(2, 3, 6, 4)
    table.set_row(0, [4, 5])
    table.set_row(1, [6])
    table.fill([1, 2], [3, 1])
    before = [part.clone() for part in table._staging.host], table.row_blocks.copy()
    with pytest.raises(InvalidArgumentError):
        eval(f"table.{call}")
    assert all(map(torch.equal, before[0], table._staging.host))
    assert (before[1] == table.row_blocks).all()


def test_ids_that_are_none_are_named():
    with pytest.raises(
        InvalidArgumentError, match=r"^block_ids: expected a sequence of ints in 0\.\.2147483647, got \[-1"
    ):
        BlockTable(1, 3, 1, 1).set_row(0, [-1, 2])


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_sizes(sizes):
    with pytest.raises(InvalidArgumentError, match="at least 1, got 0"):
        BlockTable(*sizes)


def test_sizes_that_are_no_ints():
    with pytest.raises(InvalidArgumentError, match=r"^block_size: expected an int, got 1\.5$"):
        BlockTable(1, 1, 1, 1.5)
