"""When a worker's connection ends a wakeup rings, perhaps before the socket itself knows whose it was."""

import contextlib
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.runtime.transport.wakeup import Wakeup
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import ReplicaJoined
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.loop import SchedulerShell
from octavo.testing.cluster import FakeReplica, write_fake_model
from octavo.wire.codec import encode
from octavo.wire.steps import WorkerWelcome
from octavo.worker.fake.runner import FakeRunner


class Rig:
    """A shell with one worker, whose socket takes messages as long as `takes` holds; turned by hand."""

    def __init__(self, directory: Path, context: "zmq.Context[zmq.Socket[bytes]]", wakeup: Wakeup) -> None:
        self.now, self.takes, self.sent = 0.0, True, 0
        self.wakeup = wakeup
        self.shell = SchedulerShell(
            Scheduler(SchedulerConfig(), 1),
            bind_router(context, f"ipc://{directory}/frontends"),
            bind_router(context, f"ipc://{directory}/workers"),
            clock=lambda: self.now,
            departure=wakeup,
        )
        self.shell._workers.send = self._send  # type: ignore[method-assign]
        self.shell.handle(ReplicaJoined(_worker(directory).hello))

    def _send(self, peer_id: int, message: object) -> bool:
        self.sent += 1
        return self.takes

    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.shell.turn()

    @property
    def has_worker(self) -> bool:
        return bool(self.shell.core.replicas)


def _worker(directory: Path) -> FakeReplica:
    model = write_fake_model(directory / "model")
    return FakeReplica(FakeRunner(model, block_size=4, num_blocks=8, num_cpu_blocks=0), 1)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with zmq.Context() as context:
        wakeup = Wakeup()
        rig = Rig(tmp_path, context, wakeup)
        yield rig
        wakeup.close()
        for wire in (rig.shell._frontends, rig.shell._workers):
            wire.socket.close()


def test_a_worker_that_is_gone_when_the_bell_rings_is_lost_at_once(rig: Rig) -> None:
    rig.takes = False
    rig.wakeup.ring()
    rig.turn(0.0)
    assert not rig.has_worker


@pytest.mark.parametrize("since_last_tick", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("delay", [0.006, 0.1])
def test_a_bell_that_was_quicker_than_the_socket_is_believed(rig: Rig, since_last_tick: float, delay: float) -> None:
    rig.wakeup.ring()
    rig.turn(since_last_tick)
    assert rig.has_worker
    rig.takes = False
    rig.turn(delay)
    assert not rig.has_worker


def test_a_worker_that_is_there_is_not_asked_for_ever(rig: Rig) -> None:
    rig.wakeup.ring()
    for _ in range(20):
        rig.turn(0.05)
    asked = rig.sent
    rig.turn(0.05)
    assert rig.sent == asked
    assert rig.has_worker


def test_each_look_comes_in_its_time(rig: Rig) -> None:
    rig.wakeup.ring()
    waits = [rig.shell.timed_turn()]
    while len(waits) < 5:
        rig.now += waits[-1]
        waits.append(rig.shell.timed_turn())
    assert waits == pytest.approx([0.005, 0.015, 0.08, 0.1, 0.1])


def test_the_death_of_a_worker_is_noticed_before_any_time_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By real sockets: not by a tick, a deadline, or a message that there was to send to the worker."""
    endpoint, wakeup = f"ipc://{tmp_path}/workers", Wakeup()
    sent: list[int] = []
    with (
        contextlib.closing(wakeup),
        zmq.Context() as context,
        bind_router(context, f"ipc://{tmp_path}/frontends") as frontends,
        bind_router(context, endpoint, on_disconnect=wakeup.ring) as workers,
    ):
        shell = SchedulerShell(Scheduler(SchedulerConfig(), 1), frontends, workers, clock=lambda: 0.0, departure=wakeup)
        with zmq.Context() as other, connect_dealer(other, endpoint) as worker:
            worker.send(encode(_worker(tmp_path).hello))
            assert workers.poll(60_000, zmq.POLLIN)
            shell.turn()
            assert shell.core.replicas
        # What wakes the loop, and then the socket that may know of it a moment later: that has looks of its own, above.
        assert select.select([wakeup], [], [], 60)[0]
        [connection] = shell._workers._connection_of.values()
        deadline = time.monotonic() + 60
        while shell._workers.reply(connection, WorkerWelcome(1)) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert shell.core.replicas
        monkeypatch.setattr(shell._workers, "send", lambda peer, _: sent.append(peer))
        shell.turn()
        assert not shell.core.replicas
    assert len(sent) == 1
