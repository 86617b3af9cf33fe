"""A rehearsal copies little of each sequence, and leaves the books as they are."""

import sys
from dataclasses import fields
from types import FrameType
from typing import Any, Final

from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.explain import rehearse
from octavo.scheduler.core.sequence import Placement, Sequence
from octavo.testing.oracles.paged import paged
from octavo.wire.sampling import SamplingParams

FEW, MANY, A_LITTLE = 8, 40, 20
# What tells one sequence's books from those of another time.
_BOOKS: Final = ("status", "num_known")


def running(count: int) -> SchedulerAlone:
    """All decode; a step is outstanding."""
    alone = SchedulerAlone(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096), num_blocks=1024)
    for number in range(count):
        alone.submit(make_request(str(number), alone.draw_tokens(20), SamplingParams(max_tokens=50)))
    alone.schedule()
    alone.schedule()
    alone.accept(alone.next_result())
    return alone


def calls_of_copying(alone: SchedulerAlone) -> int:
    """Calls of functions of the library that copies."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.endswith("/copy.py")

    sys.setprofile(note)
    try:
        rehearse(alone.core.state, alone.core.policy, alone.replica, None, 0.0)
    finally:
        sys.setprofile(None)
    return count


def test_copying_takes_little_for_each_sequence() -> None:
    few, many = (calls_of_copying(running(count)) for count in (FEW, MANY))
    assert 0 < many - few <= A_LITTLE * (MANY - FEW)


def books(alone: SchedulerAlone) -> list[object]:
    kv, replica = paged(alone.replica), alone.replica
    sequences: list[Sequence] = [sequence for group in replica.running for sequence in group.sequences]
    return [
        [[getattr(each, name) for name in _BOOKS] for each in sequences],
        [[getattr(each.placement, field.name) for field in fields(Placement)] for each in sequences],
        [[list(blocks) for blocks in kv.block_table(each)] for each in sequences],
        [list(each.generated_token_ids) for each in sequences],
        [kv.ref_count(block_id) for block_id in range(kv.num_blocks)],
        (kv.num_free, kv.num_cached, replica.num_running_seqs, replica.next_plan.step_id, len(replica.outstanding)),
    ]


def test_the_books_stay_as_they_are_and_the_copy_is_of_the_next_step() -> None:
    alone = running(FEW)
    before = books(alone)
    rehearsal = rehearse(alone.core.state, alone.core.policy, alone.replica, None, 0.0)
    assert rehearsal.stands
    assert len(rehearsal.builder.work) == FEW
    assert books(alone) == before
    alone.replica.check()
    rehearsal.builder.replica.kv.check()
    doubles = [rehearsal.double(group) for group in alone.replica.requests]
    assert all(double is not group for double, group in zip(doubles, alone.replica.running, strict=True))
    assert [double.sequences[0].placement.num_computed for double in doubles] == [
        group.sequences[0].placement.num_computed + 1 for group in alone.replica.running
    ]
