"""What a step takes of a worker with a disk is measured while the disk has something to do."""

from octavo.bench.parts import scheduler_step
from octavo.bench.parts.scheduler_alone import the_plan
from octavo.wire.steps import KVDisk


def stored(kv_disk: KVDisk | None) -> int:
    """Returns how many blocks plans store in 40 steps of 8 sequences, each of which fills two blocks or three."""
    alone, count = scheduler_step.decoding(8, 40, kv_disk), 0
    for _ in range(40):
        plan = the_plan(alone.schedule())
        assert len(plan.work) == 8
        count += 0 if plan.disk is None else len(plan.disk.store)
        alone.accept(alone.next_result())
    return count


def test_all_sequences_decode_beside_a_disk_and_a_mirror_stores_what_they_fill() -> None:
    assert (stored(None), stored(KVDisk())) == (0, 0)
    assert stored(KVDisk(mirror=True)) >= 16


def test_three_kinds_of_workers_are_compared() -> None:
    cost = scheduler_step.disk_cost(8, 60)
    assert cost.sequences == 8
    assert min(cost.without, cost.disk_ratio, cost.mirror_ratio) > 0
