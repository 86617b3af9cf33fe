"""The list of a step's pieces of attention: every piece once, the largest first."""

from dataclasses import replace

import pytest
import torch

from octavo.kernels.backend import GroupBatch
from octavo.kernels.triton.launch import SequenceRange, TritonStep
from octavo.kernels.triton.tiles import Tiles
from octavo.kernels.triton.work_list import WorkList, list_work

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)


def step_of(lengths: list[tuple[int, int]], device: torch.device, window: int = 0) -> TritonStep:
    """Of sequences of (query tokens, context tokens)."""
    contexts, queries = [context for _, context in lengths], [query for query, _ in lengths]
    tables = torch.zeros(len(lengths), max(contexts), dtype=torch.int64)
    slots = torch.full((sum(queries),), -1, dtype=torch.int64)
    step = TritonStep.of(GroupBatch(slots, tables, [max(1, each) for each in contexts], queries, window), 1, device)
    # As a device's step has it, where padding has no context.
    return replace(step, context_lens=torch.tensor(contexts, dtype=torch.int32, device=device))


def listed(work: WorkList) -> list[int]:
    count, taken = work.counts.tolist()
    assert taken == 0
    pieces: list[int] = work.pieces[:count].tolist()
    return pieces


def decodes(count: int, num_splits: int) -> SequenceRange:
    return SequenceRange(
        0, count, count, 1, TILES, decode=True, num_splits=num_splits, least_keys=32, multiprocessors=9
    )


def test_a_long_sequence_is_cut_and_comes_first(device: torch.device) -> None:
    step = step_of([(1, 40), (1, 200), (1, 0), (1, 70), (1, 63)], device)
    # 200 keys are four times 64, the last smaller; 70 are 48 and 22; others have no two of 32; padding has one of 0.
    expected = [4, 5, 6, 7, 16, 12, 13, 0, 8]
    assert listed(list_work(step, decodes(5, 4), 1, 0, 5)) == expected


def test_a_window_leaves_what_it_shows(device: torch.device) -> None:
    """Of 200 keys 64 and those before in their tile."""
    step = step_of([(1, 200), (1, 20)], device, window=64)
    assert listed(list_work(step, decodes(2, 4), 1, 0, 2)) == [0, 1, 4]


@pytest.mark.parametrize("first", [0, 3])
def test_many_sequences_stand_in_falling_order(first: int, device: torch.device) -> None:
    """More than one program lists."""
    contexts = [(37 * place) % 150 for place in range(170)]
    step = step_of([(1, context) for context in contexts], device)
    count = len(contexts) - first
    pieces = listed(list_work(step, decodes(170, 4), 1, first, count))
    assert len(set(pieces)) == len(pieces)

    def keys(piece: int) -> int:
        context = contexts[first + piece // 4]
        splits, tiles = max(1, min(4, context // 32)), (context + 15) // 16
        return min(context, (tiles + splits - 1) // splits * 16)

    sizes = [keys(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert {piece // 4 for piece in pieces} == set(range(count))


def test_exact_pieces_lie_at_fixed_places(device: torch.device) -> None:
    """Chunks of several tiles, from the window's first piece on; bounds of tiles that are not there have none."""
    step = step_of([(1, 100), (20, 70), (3, 3)], device, window=40)
    share = SequenceRange(0, 3, 24, 20, TILES, num_splits=4, split_keys=32)
    tiles = share.num_tiles(2)
    found = listed(list_work(step, share, 2, 0, tiles))
    # Tiles of 8 tokens. The sequences' begin at 0, 1 // 8 + 1 and 21 // 8 + 2.
    expected = {
        0: range(48 // 32, 4),
        1: range(0, 2),
        2: range(16 // 32, 3),
        3: range(16 // 32, 3),
        4: range(0, 1),
    }
    assert sorted(found) == [4 * tile + split for tile, splits in expected.items() for split in splits]
