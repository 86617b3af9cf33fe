"""Several cells: which replicas each has, and which requests it gets."""

import pytest

from octavo.scheduler.config import SchedulerConfig
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Outcome, Simulation
from octavo.simulator.routing import CellRoute
from octavo.wire.step_times import StepShape
from octavo.workload.job import Job


class _TokenTimes:
    def seconds(self, shape: StepShape) -> float:
        return shape.num_tokens / 64


SPEC = ReplicaSpec(256, 16, _TokenTimes())


def _simulation(replicas: int, cells: int) -> Simulation:
    return Simulation(Cluster(SchedulerConfig(), [SPEC] * replicas, cells), route=CellRoute(cells))


def _run(jobs: list[Job], replicas: int, cells: int) -> Outcome:
    return _simulation(replicas, cells).run(jobs)


def test_replicas_are_dealt_out_to_cells() -> None:
    assert [cell.num_replicas for cell in _simulation(5, 2).cells] == [3, 2]


@pytest.mark.parametrize("cells", [0, 3])
def test_every_cell_needs_a_replica(cells: int) -> None:
    with pytest.raises(ValueError, match=f"2 replicas cannot be dealt out to {cells} cells"):
        Cluster(SchedulerConfig(), [SPEC] * 2, cells)


def test_requests_at_the_same_time_go_to_different_cells() -> None:
    outcome = _run([Job(0.0, 64, 1) for _ in range(4)], 4, 4)
    assert [served.ttft for served in outcome.served] == [1.0] * 4


def test_a_prefix_goes_where_it_is_computed() -> None:
    jobs = [Job(20.0 * place, 80, 1, prefix="p", prefix_tokens=64) for place in range(4)]
    outcome = _run(jobs, 4, 4)
    assert [served.ttft for served in outcome.served] == [80 / 64, 16 / 64, 16 / 64, 16 / 64]


def test_a_larger_cell_gets_more() -> None:
    # Three replicas against two.
    simulation = _simulation(5, 2)
    simulation.run([Job(0.01 * place, 64, 200) for place in range(50)], horizon_s=0.6)
    assert [len(cell.core.groups) for cell in simulation.cells] == [30, 20]


def test_what_has_ended_is_known_after_a_second() -> None:
    simulation = _simulation(2, 2)
    # The second cell is sent more, but has ended it when the last one comes.
    simulation.run([Job(0.0, 64, 3000), Job(0.0, 1088, 2), Job(18.0, 32, 600)], horizon_s=18.1)
    assert [[group.request_id for group in cell.core.groups] for cell in simulation.cells] == [["0"], ["2"]]
