"""How blocks move on a GPU, on tensors of the CPU: by the copy engine, by a kernel, and in how many pieces."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.gpu import swap
from octavo.worker.gpu.swap import Pairs, copy_blocks, pinned_zeros, runs, swap_blocks
from octavo.worker.step.block_mover import block_mover


def random_pool(num_blocks: int, seed: int = 0, layers: int = 2) -> Tensor:
    return torch.randn((num_blocks, layers, 2, 4, 2, 8), generator=torch.Generator().manual_seed(seed))


@st.composite
def any_pairs(draw: st.DrawFn) -> Pairs:
    targets = draw(st.lists(st.integers(0, 9), unique=True, max_size=10))
    return [(draw(st.integers(0, 9)), target) for target in targets]


@given(any_pairs())
def test_runs_are_the_same_pairs(pairs: Pairs) -> None:
    spread = [(first + i, into + i) for first, into, count in runs(pairs) for i in range(count)]
    assert sorted(spread) == sorted(pairs)


def test_neighbours_in_both_pools_make_one_run_in_whatever_order_they_come() -> None:
    assert runs([(5, 2), (3, 0), (4, 1), (9, 3), (6, 4), (7, 5)]) == [(3, 0, 3), (6, 4, 2), (9, 3, 1)]
    assert runs([]) == []


@pytest.mark.parametrize("copy_engine", [True, False])
def test_swaps_are_those_of_the_reference_in_every_pool(copy_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [random_pool(8), random_pool(8, seed=1, layers=1)]
    ours = [random_pool(6, seed=2), random_pool(6, seed=3, layers=1)]
    monkeypatch.setattr(swap, "_COPY_ENGINE_BYTES", sources[0][0].nbytes + (not copy_engine))
    theirs = [pool.clone() for pool in ours]
    pairs = [(3, 1), (4, 2), (0, 5), (4, 0)]
    swap_blocks(sources, ours, pairs)
    for source, our, their in zip(sources, ours, theirs, strict=True):
        reference.move_blocks(source, their, pairs)
        assert torch.equal(our, their)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 4), (1, 5), (0, 2)],
        [(0, 1), (1, 2), (2, 0), (4, 3)],
        [(0, 1), (1, 2), (2, 3)],
        [(1, 1)],
    ],
    ids=["apart", "a ring", "a chain", "itself"],
)
def test_copies_are_those_of_the_reference_even_where_blocks_are_read_and_written(pairs: Pairs) -> None:
    ours = [random_pool(6), random_pool(6, seed=1, layers=1)]
    theirs = [pool.clone() for pool in ours]
    copy_blocks(ours, pairs)
    for our, their in zip(ours, theirs, strict=True):
        reference.move_blocks(their, their, pairs)
        assert torch.equal(our, their)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 21])
def test_blocks_go_to_pinned_memory_and_come_back_beside_other_work(block_bytes: int) -> None:
    shape = (32, 2, 2, 16, 2, block_bytes // (2 * 2 * 16 * 2 * 4))
    blocks, cpu_blocks = torch.randn(shape, device="cuda"), pinned_zeros(shape, torch.float32)
    assert cpu_blocks.is_pinned()
    expected = blocks.clone()
    mover, rng = block_mover([blocks], [cpu_blocks]), random.Random(0)
    there = rng.sample(range(32), 32)
    for _ in range(20):
        mover.move(BlockMoves(swap_out=[BlockMove(block, there[block]) for block in range(32)]))
        mover.before_writing(range(32))
        blocks.fill_(0)
        mover.move(BlockMoves(swap_in=[BlockMove(there[block], block) for block in range(32)]))
        blocks.add_(1)
        expected.add_(1)
    assert torch.equal(blocks, expected)
