"""Moves of whole blocks, against the oracle."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import cache_ops, reference
from octavo.kernels.native.library import VARIANT_VARIABLE, find
from octavo.testing.native import threads

Moves = list[tuple[int, int]]


@pytest.fixture(scope="module", autouse=True, params=["native", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything once with Octavo's own kernels where they are compiled, once without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv(VARIANT_VARIABLE, "none")
        find.cache_clear()
        yield
    find.cache_clear()


def random_cache(num_blocks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[num_blocks, 2 layers, 2, 3 slots, 2 heads, 4]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_blocks, 2, 2, 3, 2, 4), generator=generator).to(dtype)


def random_moves(num_sources: int, num_targets: int, count: int, seed: int) -> Moves:
    rng = random.Random(seed)
    targets = rng.sample(range(num_targets), min(count, num_targets))
    return [(rng.randrange(num_sources), target) for target in targets]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(count=st.integers(0, 9), num_blocks=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_copies_are_those_of_the_reference(count: int, num_blocks: int, seed: int) -> None:
    moves = random_moves(num_blocks, num_blocks, count, seed)
    ours = random_cache(num_blocks)
    theirs = ours.clone()
    cache_ops.copy_blocks(ours, moves)
    reference.move_blocks(theirs, theirs, moves)
    assert torch.equal(ours, theirs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(count=st.integers(0, 9), device=st.integers(1, 9), cpu=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_swaps_are_those_of_the_reference(count: int, device: int, cpu: int, seed: int) -> None:
    moves = random_moves(device, cpu, count, seed)
    source, ours = random_cache(device), random_cache(cpu, seed=1)
    kept, theirs = source.clone(), ours.clone()
    cache_ops.swap_blocks(source, ours, moves)
    reference.move_blocks(source, theirs, moves)
    assert torch.equal(ours, theirs)
    assert torch.equal(source, kept)


@pytest.mark.parametrize("move", [cache_ops.swap_blocks, reference.move_blocks])
def test_a_block_that_a_move_has_left_may_be_filled_by_another(move: Callable[[Tensor, Tensor, Moves], None]) -> None:
    cache = random_cache(4, torch.bfloat16)
    first, second = cache[1].clone(), cache[2].clone()
    move(cache, cache, [(1, 3), (2, 1)])
    assert torch.equal(cache[3], first)
    assert torch.equal(cache[1], second)
    assert torch.equal(cache[2], second)


def test_blocks_may_go_round_in_a_ring() -> None:
    cache = random_cache(5)
    before = cache.clone()
    cache_ops.copy_blocks(cache, [(0, 1), (1, 2), (2, 0), (4, 3)])
    assert torch.equal(cache, before[[2, 0, 1, 4, 4]])


def test_the_number_of_threads_does_not_show() -> None:
    source, moves = random_cache(40), random_moves(40, 60, 50, seed=0)
    expected = torch.zeros(60, 2, 2, 3, 2, 4)
    reference.move_blocks(source, expected, moves)
    for count in (1, 2, 3):
        target = torch.zeros_like(expected)
        with threads(count):
            cache_ops.swap_blocks(source, target, moves)
        assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_blocks_of_every_dtype_move(dtype: torch.dtype) -> None:
    cache = random_cache(4, dtype)
    before = cache.clone().view(torch.uint8)
    cache_ops.copy_blocks(cache, [(1, 3), (0, 2)])
    assert torch.equal(cache.view(torch.uint8), before[[0, 1, 0, 1]])


def test_caches_may_have_gaps() -> None:
    source, target = random_cache(6), random_cache(8, seed=1)
    expected = target.clone()
    reference.move_blocks(source[::2], expected[1::2], [(2, 0), (0, 3)])
    cache_ops.swap_blocks(source[::2], target[1::2], [(2, 0), (0, 3)])
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("target", "moves", "message"),
    [
        (random_cache(3), [(4, 0)], "block 4 of 4 cannot move to block 0 of 3"),
        (random_cache(3), [(0, 3)], "block 0 of 4 cannot move to block 3 of 3"),
        (random_cache(3), [(-1, 0)], "block -1 of 4"),
        (random_cache(3), [(0, 1), (2, 1)], "target of two moves"),
        (random_cache(3, torch.bfloat16), [(0, 0)], "blocks cannot move"),
        (random_cache(3)[..., :2], [(0, 0)], "blocks cannot move"),
        (random_cache(3)[0], [(0, 0)], "a cache is"),
    ],
)
def test_moves_that_cannot_be_are_refused(target: Tensor, moves: Moves, message: str) -> None:
    for move in (cache_ops.swap_blocks, reference.move_blocks):
        with pytest.raises(ValueError, match=message):
            move(random_cache(4), target, moves)
