"""Blocks say how far a draft model has followed them, whatever becomes of them."""

import torch

from octavo.testing.oracles.worker_plans import moves
from octavo.worker.step.followed_slots import FollowedSlots

TABLE = [3, 1, 4]


def slots() -> FollowedSlots:
    """Of blocks of 4 slots, with the first 10 tokens of `TABLE` followed."""
    found = FollowedSlots(8, 4, 4)
    found.followed(TABLE, 0, 10)
    return found


def test_they_end_at_the_first_gap() -> None:
    found = slots()
    assert [found.reached(TABLE, end) for end in (0, 3, 4, 9, 10, 12)] == [0, 3, 4, 9, 10, 10]
    found.written([1], 0, 2)
    assert found.reached(TABLE, 12) == 4
    found.followed(TABLE, 4, 6)
    assert found.reached(TABLE, 12) == 6
    assert found.reached([5], 3) == 0


def test_what_a_window_has_passed_does_not_count() -> None:
    found = slots()
    assert [found.reached([-1, 1, 4], end, 1) for end in (4, 7, 10, 12)] == [4, 7, 10, 10]
    assert found.reached([-1, -1, 4], 9, 2) == 9
    found.written([1], 0, 2)
    assert found.reached([-1, 1, 4], 10, 1) == 4
    assert found.reached([-1, -1, 4], 10, 2) == 10


def test_what_is_written_anew_is_to_be_followed_anew() -> None:
    found = slots()
    found.written(TABLE, 6, 9)
    assert found.reached(TABLE, 10) == 6
    assert found.reached([3, 4], 8) == 4
    found.followed(TABLE, 6, 9)
    assert found.reached(TABLE, 10) == 9


def test_they_move_with_their_blocks() -> None:
    found = slots()
    found.move(moves(swap_out=[(3, 0), (4, 1)]))
    found.written([3, 4], 0, 8)
    found.move(moves(swap_in=[(0, 6), (1, 7)], copy=[(1, 2), (7, 5)]))
    assert found.reached([6, 2, 5], 12) == 10
    # What is copied is read before anything is written over.
    found.move(moves(copy=[(6, 7), (7, 6)]))
    assert [found.reached([block], 4) for block in (6, 7)] == [2, 4]


def test_they_go_along_as_bytes() -> None:
    found, other = slots(), FollowedSlots(8, 4, 4)
    for cpu_block, part in enumerate(found.read([3, 1, 4])):
        other.fill(cpu_block, part.clone())
    other.move(moves(swap_in=[(0, 0), (1, 1), (2, 2)]))
    assert other.reached([0, 1, 2], 12) == 10
    rows = found.rows(in_cpu=False)
    assert [rows[block].tolist() for block in (3, 4)] == [[4, 0], [2, 0]]


def test_what_no_block_can_have_counts_for_nothing() -> None:
    found = FollowedSlots(8, 4, 4)
    found.fill(0, torch.tensor([5, 0], dtype=torch.uint8))
    found.fill(1, torch.tensor([4, 0], dtype=torch.uint8))
    found.move(moves(swap_in=[(0, 0), (1, 1)]))
    assert [found.reached([block], 4) for block in (0, 1)] == [0, 4]
