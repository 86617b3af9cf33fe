"""The production scheduler's core and a runner in one process, step by step, with no socket between them."""

import time
from collections import deque
from collections.abc import Callable

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    Effect,
    Event,
    FrontendJoined,
    PrefixPinned,
    ReplicaJoined,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.wire.costs import StepCosts
from octavo.wire.requests import Delta, Deltas, Prefix, Rejected, Request
from octavo.wire.steps import StepPlan, WorkerHello
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import Runner

_FRONTEND = 1
_INCARNATION = 1
ONE_STEP = SchedulerConfig(max_steps_in_flight=1)


class Engine:
    """One replica. No plan is made before the result of the one before; `hear` is told of every delta."""

    def __init__(
        self,
        runner: Runner,
        hear: Callable[[Delta], None],
        config: SchedulerConfig = ONE_STEP,
        costs: StepCosts | None = None,
    ) -> None:
        self.fingerprint = runner.model.fingerprint
        self.core = Scheduler(config, epoch=1)
        self._hear = hear
        self._protocol = WorkerProtocol("bench", runner, lambda: _INCARNATION, costs)
        self._plans: deque[StepPlan] = deque()
        self._began = time.perf_counter()
        hello = self._protocol.beat()
        assert isinstance(hello, WorkerHello)
        self._handle(FrontendJoined(_FRONTEND))
        self._handle(ReplicaJoined(hello))

    @property
    def replica(self) -> Replica:
        return self.core.replicas[_INCARNATION]

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return not self.core.groups

    def now(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._began

    def submit(self, request: Request) -> None:
        """Raises `RuntimeError` if the request is refused."""
        self._handle(RequestSubmitted(_FRONTEND, request))

    def pin(self, prefix: Prefix) -> None:
        """To be computed with the next step. Raises `RuntimeError` if it cannot be."""
        if refusal := self.core.pin_refusal(prefix):
            raise RuntimeError(refusal)
        self._handle(PrefixPinned(prefix))

    def step(self) -> float:
        """Plans and computes one step, which there must be; the seconds that the scheduler took of it."""
        planned = time.perf_counter()
        self._perform(self.core.schedule(self.now()))
        computed = time.perf_counter()
        self._protocol.receive(self._plans.popleft())
        result = self._protocol.answer()
        answered = time.perf_counter()
        self._handle(StepAnswered(_INCARNATION, result))
        return computed - planned + time.perf_counter() - answered

    def _handle(self, event: Event) -> None:
        self._perform(self.core.handle(event, self.now()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToReplica(_, StepPlan() as plan):
                    self._plans.append(plan)
                case SendToReplica(_, message):
                    self._protocol.receive(message)
                case SendToFrontend(_, Deltas(_, deltas)):
                    for delta in deltas:
                        self._hear(delta)
                case SendToFrontend(_, Rejected() as rejected):
                    raise RuntimeError(f"{rejected.request_id} was rejected: {rejected.detail}")
