"""What is computed before the first request leaves nothing to be compiled for it."""

import pytest
import torch

from octavo.kernels.backend import CacheShape
from octavo.kernels.triton.attention import TritonAttention
from octavo.kernels.triton.layers.matmul import choose_tile
from octavo.kernels.triton.tiles import num_splits, prefill_tiles
from octavo.wire.steps import KVGroup
from octavo.worker.gpu.executor import warm_up_items
from octavo.worker.sequences import WorkItem
from octavo.worker.step.forward import Paging

MOST_TOKENS = 8192
MULTIPROCESSORS = 132


def paging_of(block_size: int, num_groups: int, max_model_len: int) -> Paging:
    device = torch.device("cpu")
    attention = TritonAttention(CacheShape(block_size, 1, 64, torch.bfloat16), device)
    return Paging(attention, [KVGroup(0)] * num_groups, block_size, max_model_len, device)


def items_of(max_model_len: int = 4 * MOST_TOKENS) -> list[WorkItem]:
    return list(warm_up_items(paging_of(16, 1, max_model_len), 1 << 20, MOST_TOKENS))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 71])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_of_any_length_have_tiles_of_one_that_was_computed(group: int, head_dim: int) -> None:
    computed = {prefill_tiles(group, head_dim, torch.bfloat16, item.num_tokens) for item in items_of()}
    assert {prefill_tiles(group, head_dim, torch.bfloat16, length) for length in range(2, 1000)} <= computed


@pytest.mark.parametrize("num_columns", [1024, 6144, 24576])
def test_products_of_any_height_have_a_tile_of_one_that_was_computed(num_columns: int) -> None:
    computed = {choose_tile(item.num_tokens, num_columns, torch.bfloat16) for item in items_of()}
    assert {choose_tile(rows, num_columns, torch.bfloat16) for rows in range(2, MOST_TOKENS + 1)} <= computed


def test_small_chunks_are_computed_in_one_pass_and_in_splits() -> None:
    few_programs = 8
    for item in items_of()[:8]:
        assert (num_splits(few_programs, item.end, MULTIPROCESSORS) > 1) == (item.start > 0)


@pytest.mark.parametrize(("num_blocks", "num_groups", "max_model_len"), [(40, 1, 4096), (40, 3, 4096), (400, 2, 100)])
def test_every_chunk_lies_in_blocks_that_there_are(num_blocks: int, num_groups: int, max_model_len: int) -> None:
    paging = paging_of(4, num_groups, max_model_len)
    items = list(warm_up_items(paging, num_blocks, MOST_TOKENS))
    assert max(item.end for item in items) > 40
    for item in items:
        tables = item.sequence.block_tables
        blocks = [block for table in tables for block in table]
        assert len(tables) == num_groups
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= set(range(num_blocks))
        assert item.end == len(item.sequence.token_ids) <= min(max_model_len, len(tables[0]) * 4)


def test_where_nothing_fits_nothing_is_computed() -> None:
    assert not list(warm_up_items(paging_of(1, 2, 4096), 1, MOST_TOKENS))
