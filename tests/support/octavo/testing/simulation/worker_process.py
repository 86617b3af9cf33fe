"""A worker: the production loop and protocol, and a fake model on a device that may be slow or fail."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.network import Dealer, Network
from octavo.testing.spoilable import SpoilableRunner
from octavo.wire.steps import BlockMoves, StepTimes
from octavo.worker.fake_runner import FAKE_COSTS
from octavo.worker.liveness import Liveness
from octavo.worker.loop import WorkerLoop
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.stop_signal import StopSignal

# What the scheduler is told of a step that was made to fail; any other failure is a fault of ours.
INJECTED = "InjectedError"
_GARBAGE = -2


class InjectedError(Exception):
    """The device failed, as it was told to."""


class ForeignHistoryError(Exception):
    """A slot that a step reads holds another token than the sequence's own."""


@dataclass(frozen=True)
class Hardware:
    """What a worker is at its place, whatever process runs there."""

    directory: Path
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    windows: tuple[int, ...]
    eos_probability: float


@dataclass
class Device:
    """How a place's device does now: seconds that a step takes about, the share of steps that fail, and the share of
    those in which one sequence gets NaN."""

    normal_step_s: float
    failure_rate: float = 0.0
    nan_rate: float = 0.0

    def __post_init__(self) -> None:
        self.step_s = self.normal_step_s

    def recover(self) -> None:
        self.step_s, self.failure_rate, self.nan_rate = self.normal_step_s, 0.0, 0.0


class SimulatedRunner(SpoilableRunner):
    """Takes virtual time, fails at random, and compares all that it reads with what the sequence has said.

    `work` is told how many seconds a step takes, and `spoiled` of whose sequence gets NaN.
    """

    def __init__(
        self,
        hardware: Hardware,
        device: Device,
        random: Random,
        work: Callable[[float], None],
        spoiled: Callable[[WorkerSequence], None],
    ) -> None:
        super().__init__(**{name: getattr(hardware, name) for name in hardware.__dataclass_fields__})
        self._device = device
        self._random = random
        self._work = work
        self._tell_spoiled = spoiled

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        seconds = self._device.step_s * self._random.uniform(0.5, 1.5)
        self._work(seconds)
        if self._random.random() < self._device.failure_rate:
            self._fail(moves, items)
        self._cache.move(moves)
        self._spoil(items)
        for item in items:
            self._write(item)
        for item in [item for item in items if not self._sees_nan(item)]:
            self._check_history(item.sequence, item.start, item.start + item.num_tokens)
        sampled, candidates, failed = self._choose(items)
        prompt_logprobs = [part for item in items for part in self._prompt_logprobs(item)]
        # Of virtual time, for the clock on the wall is no function of the seed.
        return StepOutput(sampled, candidates, prompt_logprobs, failed, StepTimes(0, round(seconds * 1e6), 0))

    def _fail(self, moves: BlockMoves, items: list[WorkItem]) -> None:
        """Before anything has happened, or with garbage where the step was to write."""
        if self._random.random() < 0.5:
            self._cache.move(moves)
            for item in items:
                for table in item.sequence.block_tables:
                    self._cache.write(table, item.start, [_GARBAGE] * item.num_tokens)
        raise InjectedError

    def _spoil(self, items: list[WorkItem]) -> None:
        self.to_spoil = ()
        if items and self._random.random() < self._device.nan_rate:
            sequence = self._random.choice(items).sequence
            self.to_spoil = (sequence.sequence_id,)
            self._tell_spoiled(sequence)

    def _check_history(self, sequence: WorkerSequence, start: int, end: int) -> None:
        for group, table in zip(self.kv_groups, sequence.block_tables, strict=True):
            first = max(0, start - group.window + 1) if group.window else 0
            if self._cache.read(table, first, end) != array("i", sequence.token_ids[first:end]).tobytes():
                raise ForeignHistoryError(f"{sequence} reads what is not its own between {first} and {end}")


class _NeverAsked(StopSignal):
    """No signal comes here."""

    def __init__(self) -> None:
        self.requested = False

    def fileno(self) -> int:
        return -1


class WorkerProcess(Process):
    """One life of the worker at a place."""

    def __init__(
        self,
        network: Network,
        place: str,
        hardware: Hardware,
        device: Device,
        random: Random,
        spoiled: Callable[[WorkerSequence], None],
    ) -> None:
        super().__init__(network.clock, place)
        self.dealer = Dealer(network, "workers", place, self)
        self.protocol = WorkerProtocol(
            place,
            SimulatedRunner(hardware, device, random, self.stall, spoiled),
            partial(random.getrandbits, 64),
            FAKE_COSTS,
        )
        liveness = Liveness(self._time)
        self._loop = WorkerLoop(cast("Any", self.dealer), self.protocol, liveness, _NeverAsked(), self._time)
        self.wake()

    def turn(self) -> float:
        """One turn of the loop's own, but for the wait between two."""
        self._loop._beat_if_due()
        self._loop._receive()
        self._loop._answer_if_ready()
        return self.local_now if self.dealer.has_arrived else self._loop._next_beat

    def leave(self) -> None:
        """Ends as at SIGTERM, between two steps."""
        self._loop._leave()
        self.kill()

    def _time(self) -> float:
        return self.local_now
