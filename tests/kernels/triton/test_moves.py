"""Block moves in Triton, against the oracle."""

import random

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton.moves import copy_blocks, move_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of blocks [2 layers, 2, ...]: a part of a piece of 16 KiB, one, one and a part, and no multiple of 16 bytes.
INNER = {"small": (3, 2, 8), "one piece": (16, 2, 32), "more than one": (16, 3, 36), "odd": (1, 1, 3)}


def random_pool(num_blocks: int, inner: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_blocks, 2, 2, *inner), generator=generator).to(dtype).to(DEVICE)


def as_pairs(moves: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(moves, dtype=torch.int32, device=DEVICE).view(-1, 2)


def content(pool: Tensor) -> Tensor:
    return pool.cpu().view(torch.uint8)


@pytest.mark.parametrize("programs", [None, 1, 3])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
def test_moves_between_pools_are_those_of_the_reference(inner: tuple[int, ...], programs: int | None) -> None:
    source, ours = random_pool(5, inner), random_pool(7, inner, seed=1)
    kept, theirs = source.clone(), ours.clone()
    moves = [(4, 6), (0, 1), (4, 0)]
    move_blocks(source, ours, as_pairs(moves), programs=programs)
    reference.move_blocks(source, theirs, moves)
    assert torch.equal(content(ours), content(theirs))
    assert torch.equal(content(source), content(kept))


@pytest.mark.parametrize("seed", range(3))
def test_copies_within_a_pool_are_those_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.sample(range(9), 9)
    moves = [(rng.choice(blocks[:4]), target) for target in blocks[4 : 5 + seed]]
    ours = random_pool(9, INNER["small"], seed=seed)
    theirs = ours.clone()
    copy_blocks(ours, as_pairs(moves))
    reference.move_blocks(theirs, theirs, moves)
    assert torch.equal(content(ours), content(theirs))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_blocks_of_every_dtype_move(dtype: torch.dtype) -> None:
    ours = random_pool(3, INNER["small"], dtype)
    before = content(ours)
    copy_blocks(ours, as_pairs([(2, 0)]))
    assert torch.equal(content(ours), before[[2, 1, 2]])


def test_no_moves_are_none() -> None:
    pool = random_pool(2, INNER["small"])
    before = content(pool)
    copy_blocks(pool, as_pairs([]))
    assert torch.equal(content(pool), before)


@pytest.mark.parametrize(
    ("target", "pairs", "message"),
    [
        (random_pool(2, (3, 2, 4)), as_pairs([(0, 1)]), "blocks cannot move"),
        (random_pool(2, INNER["small"], torch.bfloat16), as_pairs([(0, 1)]), "blocks cannot move"),
        (random_pool(2, INNER["small"]), as_pairs([(0, 1)]).long(), "pairs are"),
        (random_pool(2, INNER["small"]), as_pairs([(0, 1)])[0], "pairs are"),
        (random_pool(4, INNER["small"])[::2], as_pairs([(0, 1)]), "have gaps"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(target: Tensor, pairs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        move_blocks(random_pool(2, INNER["small"]), target, pairs)


def test_blocks_that_are_no_whole_words_are_refused() -> None:
    pool = random_pool(2, (3, 2, 1), torch.bfloat16)
    with pytest.raises(ValueError, match="no multiple of 4 bytes"):
        copy_blocks(pool, as_pairs([(0, 1)]))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_blocks_move_to_pinned_memory_and_back() -> None:
    device, there = random_pool(64, INNER["more than one"]), random_pool(64, INNER["more than one"]).cpu().pin_memory()
    before = content(device)
    move_blocks(device, there, as_pairs([(block, 63 - block) for block in range(64)]), programs=8)
    device.zero_()
    move_blocks(there, device, as_pairs([(63 - block, block) for block in range(64)]), programs=8)
    assert torch.equal(content(device), before)
