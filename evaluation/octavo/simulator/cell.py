"""Runs one scheduler and its replicas in virtual time."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    Effect,
    FrontendJoined,
    PrefixPinned,
    ReplicaJoined,
    ReplicaLost,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.simulator.device import Device, ReplicaSpec
from octavo.wire.requests import Deltas, Prefix, Rejected, Request
from octavo.wire.steps import StepPlan

_FRONTEND = 1


class SimulationError(Exception):
    """Says why a simulation cannot go on."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Describes a step that will be done."""

    time: float
    incarnation: int


class Cell:
    """Runs the scheduler's core in virtual time, in the place of its shell. `take` gets the messages for clients."""

    def __init__(
        self,
        config: SchedulerConfig,
        replicas: Sequence[ReplicaSpec],
        take: Callable[[Deltas | Rejected, float], None],
        *,
        make_memory: MakeMemory = paged_memory,
        policy: StepPolicy | None = None,
        link_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.core = Scheduler(config, epoch=1, make_memory=make_memory, policy=policy)
        self.devices: dict[int, Device] = {}
        self._take = take
        self._link_s = link_s
        self.core.handle(FrontendJoined(_FRONTEND), 0.0)
        for incarnation, spec in enumerate(replicas, start=1):
            self.devices[incarnation] = Device(spec, incarnation, random.Random(f"{seed} {incarnation}"))
            for effect in self.core.handle(ReplicaJoined(spec.hello(incarnation)), 0.0):
                if isinstance(effect, ReplicaLost) or incarnation not in self.core.replicas:
                    raise SimulationError(f"replica {incarnation} may not join: {effect}")

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def work_tokens(self) -> int:
        """Returns the tokens still to be computed of all that is held, as the cell's scheduler reports to frontends."""
        return sum(group.work_tokens for group in self.core.groups)

    @property
    def is_idle(self) -> bool:
        """Returns whether the core holds no request of a client."""
        return not any(self.core.request_table.held.values())

    def pin(self, prefix: Prefix) -> None:
        """Keeps a prefix computed on every replica."""
        if refusal := self.core.pin_refusal(prefix):
            raise SimulationError(f"prefix {prefix.name} cannot be pinned: {refusal}")
        self.core.handle(PrefixPinned(prefix), 0.0)

    def submit(self, request: Request, now: float) -> None:
        """Submits a request."""
        self._deliver(self.core.handle(RequestSubmitted(_FRONTEND, request), now), now)

    def answer(self, incarnation: int, now: float) -> None:
        """Answers a replica's oldest step."""
        step = self.core.replicas[incarnation].outstanding[0]
        result = self.devices[incarnation].answer(step, self.core.epoch)
        self._deliver(self.core.handle(StepAnswered(incarnation, result), now), now)

    def plan(self, now: float) -> Iterator[Pending]:
        """Asks for plans; the steps that will be done, and when their results are here."""
        for effect in self.core.schedule(now):
            if isinstance(effect, SendToReplica) and isinstance(effect.message, StepPlan):
                incarnation = effect.replica_id
                step = self.core.replicas[incarnation].outstanding[-1]
                num_sampled = len(step.samplers) + len(step.beams)
                done = self.devices[incarnation].take(effect.message, num_sampled, now + self._link_s)
                yield Pending(done + self._link_s, incarnation)
            else:
                self._deliver([effect], now)

    def _deliver(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case SendToFrontend(_, Deltas() | Rejected() as message):
                    self._take(message, now)
                case ReplicaLost(_, cause, reason):
                    raise SimulationError(f"a replica was lost: {cause}, {reason}")
