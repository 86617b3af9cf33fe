"""One chunk for each sequence, from admission to the end; forks are copied."""

import pytest

from octavo.paper.contiguous_kv import (
    ContiguousKV,
    Reserve,
    exactly,
    longest_possible,
    next_power_of_two,
)
from octavo.scheduler.core.sequence import RequestGroup, Sequence, SequenceGroup
from octavo.testing.cluster import make_request

BLOCK_SIZE = 4
MAX_LEN = 64


def kv_of(num_slots: int = 64, reserve: Reserve = exactly) -> ContiguousKV:
    return ContiguousKV(num_slots // BLOCK_SIZE, BLOCK_SIZE, MAX_LEN, reserve)


def group_of(prompt: int, output: int, count: int = 1) -> SequenceGroup:
    request = make_request("r", prompt, output, num_sequences=count, temperature=1.0)
    return RequestGroup(request, 0.0, (0.0, 0), frontend_id=1)


def can_start(kv: ContiguousKV, group: SequenceGroup) -> bool:
    return kv.num_needed(group) <= kv.num_free


def start(kv: ContiguousKV, prompt: int, output: int, count: int = 1) -> Sequence:
    """The first sequence of a group that has got its chunks; the others follow it."""
    group = group_of(prompt, output, count)
    assert can_start(kv, group)
    assert kv.allocate(group, 1) == []
    return group.sequences[0]


@pytest.mark.parametrize(
    ("reserve", "asked"),
    [(exactly, 5 + 25), (next_power_of_two, 5 + 32), (longest_possible, MAX_LEN)],
)
def test_what_a_prompt_of_5_and_an_output_of_25_reserve(reserve: Reserve, asked: int) -> None:
    assert reserve(5, 25, MAX_LEN) == asked


@pytest.mark.parametrize(("output", "room"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_the_next_power_of_two_is_for_the_output_alone(output: int, room: int) -> None:
    assert next_power_of_two(3, output, MAX_LEN) == 3 + room


def test_no_reservation_goes_beyond_the_context() -> None:
    assert next_power_of_two(30, 33, MAX_LEN) == MAX_LEN


def test_each_sequence_has_a_chunk_of_its_own() -> None:
    kv = kv_of()
    sequences = [start(kv, 5, 8) for _ in range(4)]
    assert sorted(kv.block_table(sequence)[0][0] for sequence in sequences) == [0, 16, 32, 48]
    assert not can_start(kv, group_of(1, 1))
    assert kv.num_free == 0
    kv.free(sequences[1])
    assert can_start(kv, group_of(8, 8))
    assert not can_start(kv, group_of(8, 9))
    kv.check()


def test_a_group_reserves_for_all_its_sequences_at_once_and_gives_back_at_its_end() -> None:
    kv = kv_of()
    parent = start(kv, 5, 8, count=3)
    assert kv.num_free == 4
    child = parent.fork(1)
    kv.fork(parent, child)
    kv.check()
    kv.free(parent)
    assert kv.num_free == 4, "its group still runs"
    kv.free(child)
    assert kv.num_free == kv.num_blocks
    kv.check()


def test_a_fork_is_copied_when_it_is_computed_next() -> None:
    kv = kv_of()
    parent = start(kv, 9, 4, count=2)
    assert kv.extend(parent) is None
    parent.placement.num_computed = 9
    child = parent.fork(1)
    kv.fork(parent, child)
    assert kv.block_table(child) == [[]]
    growth = kv.extend(child)
    assert growth is not None
    source, target = kv.block_table(parent)[0][0], kv.block_table(child)[0][0]
    assert [(move.source, move.target) for move in growth.copies] == [
        (source, target),
        (source + 4, target + 4),
        (source + 8, target + 8),
    ]
    assert not growth.remaps
    assert not growth.new_block_ids
    assert kv.extend(child) is None


def test_beams_that_end_make_room_for_those_that_fork() -> None:
    """Two of three beams end, and the third goes on three times: no more chunks than beams."""
    kv = kv_of()
    first = start(kv, 6, 10, count=3)
    beams = [first, first.fork(1), first.fork(2)]
    for beam in beams[1:]:
        kv.fork(first, beam)
    for beam in beams:
        kv.extend(beam)
        beam.placement.num_computed = 7
    children = [beams[1].fork(3), beams[1].fork(4)]
    for child in children:
        kv.fork(beams[1], child)
    kv.free(beams[0])
    kv.free(beams[2])
    kv.check()
    for child in children:
        assert kv.extend(child) is not None
    kv.check()
    assert len({kv.block_table(beam)[0][0] for beam in (beams[1], *children)}) == 3


def test_a_fork_that_takes_over_its_parents_chunk_is_not_copied() -> None:
    kv = kv_of(32)
    parent = start(kv, 8, 8)
    parent.placement.num_computed = 8
    child = parent.fork(1)
    kv.fork(parent, child)
    kv.free(parent)
    assert kv.extend(child) is None
    kv.check()


def test_chunks_come_back_once_the_outstanding_step_is_answered() -> None:
    kv = kv_of()
    sequence = start(kv, 8, 8)
    kv.free(sequence, 7)
    kv.check()
    assert kv.num_free == 12
    kv.step_answered(6, valid=True)
    assert kv.num_free == 12
    kv.step_answered(7, valid=True)
    assert kv.num_free == 16


def test_what_never_fits_is_an_error_and_does_not_wait_for_ever() -> None:
    kv = kv_of(48, longest_possible)
    with pytest.raises(ValueError, match=r"1 sequences of 64 tokens each never fit .* 48 slots"):
        kv.num_needed(group_of(4, 4))


def test_a_prefix_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="never keeps a prefix"):
        kv_of().reserve("p", 4)


def test_slots_that_are_free_and_lie_apart_are_not_enough() -> None:
    kv = kv_of()
    sequences = [start(kv, 5, 8) for _ in range(4)]
    # Twins are merged, so the two that are given back must be none.
    for sequence in sequences[::2]:
        kv.free(sequence)
    assert kv.num_free * BLOCK_SIZE == 32
    assert kv.num_needed(group_of(16, 16)) > kv.num_free
    assert can_start(kv, group_of(8, 8, count=2))
