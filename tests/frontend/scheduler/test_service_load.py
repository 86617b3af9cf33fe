"""How busy a cell is, as its frontend knows it: told while it is fresh, and missing as soon as it may be another."""

from unittest.mock import Mock

import msgspec
import pytest

from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerClient
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.metrics import LOAD_METRICS, CellMetrics
from octavo.testing.metrics import told
from octavo.wire.requests import (
    RENEW_INTERVAL_S,
    BlockUse,
    Deltas,
    FrontendWelcome,
    Renewed,
    ServiceLoad,
    ServiceStatus,
    StatusChanged,
    ToFrontend,
)
from octavo.wire.steps import ModelInfo

EPOCH = 5
MODEL = ModelInfo("model", "fingerprint", "float32", 100, 100)
STATUS = ServiceStatus(1, MODEL, 100, 8, load=ServiceLoad(1, 2, [BlockUse(16, 10, 5)]))
AGE = "octavo_cell_status_age_seconds"


class Frontend:
    """The links of a frontend, whose clock and whose schedulers' words are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cells: int = 1) -> None:
        self.now = 1000.0
        monkeypatch.setattr("octavo.frontend.scheduler.client.time", Mock(monotonic=lambda: self.now))
        self.pool = SchedulerPool([f"ipc:///cell-{n}" for n in range(num_cells)], "fingerprint", grace_s=30.0)
        self.metrics = CellMetrics("model", self.pool)

    def hear(self, message: ToFrontend, cell: int = 0) -> None:
        self._link(cell)._session.receive(message, self.now)

    def lose(self, cell: int = 0) -> None:
        self._link(cell)._session.disconnected()

    def _link(self, cell: int) -> SchedulerClient:
        return self.pool.links[cell]

    def told(self) -> dict[str, float]:
        return told(self.metrics)

    def names(self) -> set[str]:
        return {family.name for family in self.metrics.collect()}


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    return Frontend(monkeypatch)


def changed(waiting: int, running: int = 0) -> StatusChanged:
    load = ServiceLoad(waiting, running, [BlockUse(16, 10, running)])
    return StatusChanged(EPOCH, msgspec.structs.replace(STATUS, load=load))


def test_before_the_schedulers_first_word_there_is_no_load(frontend: Frontend) -> None:
    assert not frontend.names() & LOAD_METRICS
    assert AGE not in frontend.told()


@pytest.mark.parametrize(
    "message", [FrontendWelcome(EPOCH, STATUS), Renewed(EPOCH, [], STATUS), StatusChanged(EPOCH, STATUS)]
)
def test_every_message_with_a_status_makes_the_load_known_for_two_seconds(
    frontend: Frontend, message: ToFrontend
) -> None:
    frontend.hear(FrontendWelcome(EPOCH, msgspec.structs.replace(STATUS, load=None)))
    assert not frontend.names() & LOAD_METRICS
    frontend.hear(message)
    frontend.now += 2 * RENEW_INTERVAL_S
    assert frontend.names() >= LOAD_METRICS
    assert frontend.told()["vllm:num_requests_running"] == 2
    assert frontend.told()[AGE] == 2 * RENEW_INTERVAL_S


def test_a_load_that_is_old_is_missing_whole_and_its_age_is_told(frontend: Frontend) -> None:
    frontend.hear(FrontendWelcome(EPOCH, STATUS))
    frontend.now += 2 * RENEW_INTERVAL_S + 0.1
    # Tokens that come prove that the scheduler lives, and say nothing of its load.
    frontend.hear(Deltas(EPOCH, []))
    assert frontend.pool.links[0].away_s() == 0
    assert not frontend.names() & LOAD_METRICS
    assert frontend.told()[AGE] == pytest.approx(2 * RENEW_INTERVAL_S + 0.1)
    frontend.hear(changed(3))
    assert frontend.told()["vllm:num_requests_waiting"] == 3


def test_with_the_connection_the_load_is_gone_at_once(frontend: Frontend) -> None:
    frontend.hear(FrontendWelcome(EPOCH, STATUS))
    frontend.lose()
    assert not frontend.names() & LOAD_METRICS


def test_a_cell_with_another_model_does_not_count(frontend: Frontend) -> None:
    other = msgspec.structs.replace(MODEL, fingerprint="another")
    frontend.hear(FrontendWelcome(EPOCH, msgspec.structs.replace(STATUS, model=other)))
    assert frontend.pool.availability is SchedulerAvailability.MODEL_MISMATCH
    assert not frontend.names() & LOAD_METRICS


def test_of_several_cells_those_that_are_known_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = Frontend(monkeypatch, num_cells=2)
    for cell in range(2):
        frontend.hear(FrontendWelcome(EPOCH, STATUS), cell)
    assert frontend.told()["vllm:num_requests_running"] == 4
    frontend.hear(changed(7), 0)
    assert (frontend.told()["vllm:num_requests_waiting"], frontend.told()["vllm:num_requests_running"]) == (8, 2)
    frontend.lose(1)
    assert frontend.told()["vllm:num_requests_waiting"] == 7
    assert frontend.told()["octavo_cell_ready"] == 1
