"""Flattening: what each token of a step is, where it goes, and which tokens choose the next one."""

import pytest
import torch

from octavo.testing.models import GREEDY
from octavo.worker.batch import build_batch
from octavo.worker.sequences import WorkerSequence, WorkItem

CPU = torch.device("cpu")


def item(token_ids: list[int], block_ids: list[int], start: int, num_tokens: int) -> WorkItem:
    sequence = WorkerSequence(1, 0, GREEDY, len(token_ids), token_ids, start, block_ids)
    return WorkItem(sequence, start, num_tokens, samples=start + num_tokens == len(token_ids))


def test_a_mixed_step_is_flattened_in_order() -> None:
    batch = build_batch(
        [
            item([10, 11, 12, 13, 14, 15], [7, 3], start=5, num_tokens=1),
            item([20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 2, 9], start=2, num_tokens=5),
            item([30, 31, 32], [4], start=0, num_tokens=3),
        ],
        block_size=4,
        device=CPU,
    )
    assert batch.input_ids.tolist() == [15, 22, 23, 24, 25, 26, 30, 31, 32]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 6, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [3 * 4 + 1, 22, 23, 8, 9, 10, 16, 17, 18]
    assert batch.sample_rows.tolist() == [0, 8]
    assert batch.fresh_blocks.tolist() == [2, 4]
    assert batch.block_tables.tolist() == [[7, 3], [5, 2], [4, 0]]
    assert batch.context_lens == [6, 7, 3]
    assert batch.query_lens == [1, 5, 3]


@pytest.mark.parametrize("block_size", [1, 2, 256])
def test_slots_follow_the_block_table_at_any_block_size(block_size: int) -> None:
    token_ids, block_ids = list(range(100, 109)), [8, 1, 6, 3, 0, 2, 4, 7, 5]
    batch = build_batch([item(token_ids, block_ids, 1, 8)], block_size, CPU)
    expected = [block_ids[p // block_size] * block_size + p % block_size for p in range(1, 9)]
    assert batch.slot_mapping.tolist() == expected


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    assert build_batch([item([1, 2, 3, 4], [0], 0, 3)], 16, CPU).sample_rows.tolist() == []
