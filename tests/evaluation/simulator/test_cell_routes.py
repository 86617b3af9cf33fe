"""Several cells: which replicas each has, which requests it gets, and that processes may share them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.runtime.models.step_times import StepTimeModel, TokenTime
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator.cell import SimulationError
from octavo.simulator.cluster_options import CellRoute
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Arrival, Cluster, ShardProcess, Simulation, SimulationOutcome
from octavo.wire.requests import Prefix
from octavo.workload.job import Job

# 1/64 s for each token.
SPEC = ReplicaSpec(256, 16, StepTimeModel([TokenTime(1, 1 / 64), TokenTime(2, 2 / 64)], *8 * [0.0]))


def _simulation(replicas: int, cells: int, processes: int = 1) -> Simulation:
    cluster = Cluster(SchedulerConfig(), [SPEC] * replicas, cells)
    return Simulation(cluster, route=CellRoute(cells), sample_every_s=0.5, processes=processes)


def _run(jobs: list[Job], replicas: int, cells: int, processes: int = 1) -> SimulationOutcome:
    return _simulation(replicas, cells, processes).run(jobs)


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


def test_processes_that_share_the_cells_come_to_the_same() -> None:
    jobs = [Job(0.05 * place, 16 + place, 8, prefix=f"p{place % 3}", prefix_tokens=16) for place in range(60)]
    alone, shared = (_run(jobs, 6, 5, processes) for processes in (1, 2))
    assert [each.finished_s for each in alone.served] == [each.finished_s for each in shared.served]
    assert alone.served == shared.served
    assert alone.samples == shared.samples
    for name in ("seconds", "steps", "busy_share", "preemptions"):
        assert getattr(alone, name) == getattr(shared, name), name
    assert (alone.gaps.count, alone.gaps.mean) == (shared.gaps.count, shared.gaps.mean)


def test_what_a_process_cannot_simulate_is_told() -> None:
    pinned = Prefix("p", list(range(160)))
    cluster = Cluster(SchedulerConfig(), [SPEC, replace(SPEC, num_blocks=4)], 2, pinned=[pinned])
    with pytest.raises(SimulationError, match="prefix p cannot be pinned"):
        Simulation(cluster, route=CellRoute(2), processes=2).run([])


def test_a_process_that_ends_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[ShardProcess] = []
    begin_run = ShardProcess.begin_run

    def killed(self: ShardProcess, arrivals: Sequence[Arrival], until: float) -> None:
        begun.append(self)
        self.process.kill()
        begin_run(self, arrivals, until)

    monkeypatch.setattr(ShardProcess, "begin_run", killed)
    with pytest.raises(SimulationError, match=r"has ended \(exit status -9\)"):
        _run([Job(0.0, 64, 1)], 2, 2, processes=2)
    assert [each.process.is_alive() for each in begun] == [False]


def test_there_are_no_more_processes_than_cells() -> None:
    with pytest.raises(ValueError, match="2 cells cannot be dealt out to 3 processes"):
        _simulation(4, 2, processes=3)


def test_a_probe_sees_the_cores_of_one_process_alone() -> None:
    cluster = Cluster(SchedulerConfig(), [SPEC] * 2, 2)
    with pytest.raises(ValueError, match="cores of other processes"):
        Simulation(cluster, route=CellRoute(2), probe=lambda time, core: None, processes=2)
