"""Runs the worker's production loop and protocol on a simulated device."""

import signal
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import msgspec

from octavo.testing.simulation.clock import NEVER, Process
from octavo.testing.simulation.device import Device, Ending, Hardware, PoisonedError, SimulatedRunner, Witness
from octavo.testing.simulation.disk import DiskStore, SimulatedDisk
from octavo.testing.simulation.network import Dealer, Network
from octavo.testing.simulation.peers import SimulatedExchange
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.steps import Predecessor, WorkerHello, WorkerRole
from octavo.worker.block_disk import BlockDisk
from octavo.worker.block_pulls import BlockPulls
from octavo.worker.fake.runner import FAKE_COSTS
from octavo.worker.health import Liveness
from octavo.worker.kv_store.loan import Payload
from octavo.worker.loop import WorkerLoop
from octavo.worker.process import StopSignal
from octavo.worker.protocol import RefusedError, WorkerProtocol


class _Signals(StopSignal):
    """Signals that come when they are said to."""

    def __init__(self) -> None:
        self.requested = self.insisted = False

    def fileno(self) -> int:
        return -1

    def noticed(self) -> None:
        """Does nothing, as nobody polls."""

    def come(self) -> None:
        self._note(signal.SIGTERM, None)


class OtherVersion(WorkerProtocol):
    """Speaks another schema, as a release of another version does."""

    def _hello(self) -> WorkerHello:
        return msgspec.structs.replace(super()._hello(), schema_version=SCHEMA_VERSION + 1)


class WorkerProcess(Process):
    """Runs one life of the worker at a place. It calls `ended` with the way in which it ended by itself."""

    def __init__(
        self,
        network: Network,
        place: str,
        hardware: Hardware,
        device: Device,
        random: Random,
        tell: Witness,
        ended: "Callable[[WorkerProcess, Ending, str], None]",
        speaks: type[WorkerProtocol] = WorkerProtocol,
        predecessor: Predecessor | None = None,
        disk: SimulatedDisk | None = None,
        exchanges: dict[str, SimulatedExchange] | None = None,
        role: WorkerRole = WorkerRole.BOTH,
    ) -> None:
        super().__init__(network.clock, place)
        self.dealer = Dealer(network, "workers", place, self)
        self._random = random
        self._runner = SimulatedRunner(hardware, device, random, self.stall, tell)
        kept = self._opened(disk) if disk is not None and hardware.num_cpu_blocks else None
        pulls = self._pulls(network, exchanges) if exchanges is not None and hardware.num_cpu_blocks else None
        # Unmeasured, both are used even where to compute tokens takes nobody any time.
        costs = FAKE_COSTS if kept is None and pulls is None else None
        self.protocol = speaks(place, self._runner, self._draw_incarnation, costs, predecessor, kept, pulls, role)
        self._signals = _Signals()
        liveness = Liveness(self._time)
        self.has_served = False
        self._loop = WorkerLoop(
            *(cast("Any", self.dealer), self.protocol, liveness, self._signals, self._time), on_welcome=self._welcomed
        )
        self._ended = ended
        self.wake()

    def turn(self) -> float:
        """One turn of the loop's own, but for the wait between two."""
        try:
            if self._loop._is_over():
                self._leave()
                return NEVER
            self._loop._beat_if_due()
            self._loop._receive()
            self._loop._report_arrivals()
            self._loop._answer_if_ready()
            self._loop._report_arrivals()
            assert self.protocol.epoch is None or not isinstance(self.protocol, OtherVersion), (
                "it speaks another schema"
            )
        except RefusedError as refusal:
            self._end(Ending.REFUSED, str(refusal))
        except PoisonedError as poison:
            self._end(poison.ending)
        return self.local_now if self.dealer.has_arrived or self.protocol.dismissed else self._loop._next_beat

    def terminate(self) -> None:
        """SIGTERM: it is to end, once the scheduler lets it; at the second one, between two steps."""
        self._signals.come()
        self.wake()

    @property
    def is_leaving(self) -> bool:
        """Tells whether it was asked to end."""
        return self._signals.requested

    def _opened(self, disk: SimulatedDisk) -> BlockDisk:
        identity = self._runner.kv_identity
        store = DiskStore(disk, identity, self)
        return BlockDisk(store, disk.plan.description, identity.block_bytes, self._runner.fill_cpu_block)

    def _pulls(self, network: Network, exchanges: dict[str, SimulatedExchange]) -> BlockPulls:
        def peek(block_ids: Sequence[int], in_cpu: bool) -> list[Payload] | None:
            return self._runner.peek_blocks(block_ids, in_cpu=in_cpu)

        identity = self._runner.kv_identity
        exchange = SimulatedExchange(network, exchanges, self, peek)
        fill = self._runner.fill_cpu_block
        return BlockPulls(exchange, identity.directory_name, identity.block_bytes, fill, self._time)

    def _welcomed(self) -> None:
        self.has_served = True

    def _leave(self) -> None:
        was_dismissed = self.protocol.dismissed
        assert not (was_dismissed and self.protocol.busy), "it is let go in the middle of a step"
        may_leave = was_dismissed or self._signals.insisted or self.protocol.epoch is None
        assert may_leave or self.local_now >= self._loop._leave_by, "it does not wait until it is let go"
        self._loop._leave()
        self._end(Ending.DISMISSED if was_dismissed else Ending.LEFT)

    def _end(self, ending: Ending, why: str = "") -> None:
        if ending is Ending.HUNG:
            self.stall(NEVER)
        else:
            self.kill()
        self._ended(self, ending, why)

    def _draw_incarnation(self) -> int:
        self._runner.incarnation = self._random.getrandbits(64)
        return self._runner.incarnation

    def _time(self) -> float:
        return self.local_now
