"""Block ids that would reach a neighbour's memory are refused with the reason."""

import pytest

from octavo.testing.oracles.worker_plans import moves
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMoves
from octavo.worker.step.plan_checks import PlanError, check_block_ids, check_distinct, check_moves


@pytest.mark.parametrize(
    "sound",
    [
        BlockMoves(),
        moves(swap_out=[(11, 2), (0, 0)]),
        moves(swap_in=[(2, 11), (0, 0)]),
        moves(swap_in=[(2, 11)], copy=[(11, 4), (11, 5)]),
        moves(swap_out=[(4, 1)], copy=[(7, 4)]),
    ],
)
def test_sound_moves_pass(sound: BlockMoves) -> None:
    check_moves(sound, num_blocks=12, num_cpu_blocks=3)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (moves(swap_out=[(1, 1), (2, 2)], swap_in=[(0, 5), (2, 1)]), r"fills CPU blocks \[2\] before it reads them"),
        (moves(swap_out=[(12, 0)]), "swap_out moves block 12 to 0; there are 12 to move from and 3"),
        (moves(swap_out=[(0, 3)]), "swap_out moves block 0 to 3"),
        (moves(swap_in=[(3, 0)]), "swap_in moves block 3 to 0; there are 3 to move from and 12"),
        (moves(swap_in=[(0, 12)]), "swap_in moves block 0 to 12"),
        (moves(copy=[(12, 0)]), "copy moves block 12"),
        (moves(copy=[(0, 12)]), "copy moves block 0 to 12"),
        (moves(copy=[(NULL_BLOCK, 1)]), "copy moves block -1"),
        (moves(copy=[(1, NULL_BLOCK)]), "copy moves block 1 to -1"),
        (moves(copy=[(1, 3), (2, 3)]), "copy moves two blocks to one"),
        (moves(swap_out=[(1, 0), (2, 0)]), "swap_out moves two blocks to one"),
        (moves(swap_in=[(1, 0), (2, 0)]), "swap_in moves two blocks to one"),
    ],
)
def test_moves_between_blocks_that_cannot_be_meant_are_refused(bad: BlockMoves, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_moves(bad, num_blocks=12, num_cpu_blocks=3)


def test_only_a_window_may_have_no_block() -> None:
    check_block_ids([NULL_BLOCK, 3], 12, window=5, name="s")
    with pytest.raises(PlanError, match="s is given no block where"):
        check_block_ids([NULL_BLOCK, 3], 12, window=0, name="s")
    with pytest.raises(PlanError, match="s is given blocks -2 to 3; there are 12"):
        check_block_ids([-2, 3], 12, window=5, name="s")
    with pytest.raises(PlanError, match="s is given blocks 3 to 12; there are 12"):
        check_block_ids([12, 3], 12, window=5, name="s")


def test_no_block_may_stand_twice_in_the_tables_of_a_sequence() -> None:
    check_distinct([[1, 2], [NULL_BLOCK, NULL_BLOCK, 3]], "s")
    for tables in ([[1, 2, 1], [3]], [[1, 2], [NULL_BLOCK, 2]]):
        with pytest.raises(PlanError, match="s holds a block twice"):
            check_distinct(tables, "s")
