"""The worker alone: the production scheduler's core and the model in one process, no socket between them."""

import os
import time
from collections import deque
from dataclasses import replace

from octavo.bench.measurement import Measurement, Stream, measured
from octavo.bench.processes import Meter
from octavo.bench.scheduler_alone import make_request
from octavo.bench.workloads import Case, Job
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import (
    Effect,
    FrontendJoined,
    ReplicaJoined,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.replica import ReplicaStats
from octavo.scheduler.scheduler import Scheduler
from octavo.wire.requests import Deltas, Rejected
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import StepPlan, WorkerHello
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import Runner

_FRONTEND = 1
_INCARNATION = 1


class InProcess:
    """One replica, driven step by step: no plan is made before the result of the one before."""

    def __init__(self, runner: Runner) -> None:
        self._core = Scheduler(SchedulerConfig(max_steps_in_flight=1), epoch=1)
        self._protocol = WorkerProtocol("bench", runner, lambda: _INCARNATION)
        self._fingerprint = runner.model.fingerprint
        self._plans: deque[StepPlan] = deque()
        self._streams: dict[str, Stream] = {}
        self._began = 0.0
        hello = self._protocol.beat()
        assert isinstance(hello, WorkerHello)
        self._perform(self._core.handle(FrontendJoined(_FRONTEND), 0.0))
        self._perform(self._core.handle(ReplicaJoined(hello), 0.0))

    def run(self, case: Case) -> Measurement:
        """All of the case's requests, submitted at once."""
        meter, steps = Meter({"worker": os.getpid()}), self._stats().steps
        self.submit(case)
        stage_s = self.advance()
        wall, cpu, steps = self._now(), meter.cpu_s(), self._stats().steps - steps
        return measured(case, wall, list(self._streams.values()), steps, stage_s, cpu)

    def submit(self, case: Case) -> None:
        """Nothing may be running."""
        self._began = time.perf_counter()
        self._streams = {f"{case.name}-{i}": Stream() for i in range(len(case.jobs))}
        for request_id, job in zip(self._streams, case.jobs, strict=True):
            request = make_request(request_id, job.prompt_token_ids, _sampling(job), self._fingerprint)
            self._perform(self._core.handle(RequestSubmitted(_FRONTEND, request), self._now()))

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return not self._core.groups

    def advance(self, num_steps: int | None = None) -> dict[str, float]:
        """Runs so many steps, or until all is done; the seconds that each stage took."""
        before, scheduling, left = self._stats(), 0.0, num_steps
        while not self.is_idle and left != 0:
            scheduling += self._step()
            left = None if left is None else left - 1
        after = self._stats()
        return {
            "scheduler": scheduling,
            "prepare": (after.prepare_us - before.prepare_us) / 1e6,
            "model": (after.model_us - before.model_us) / 1e6,
            "sample": (after.sample_us - before.sample_us) / 1e6,
        }

    def _step(self) -> float:
        """The seconds that the scheduler took of it."""
        planned = time.perf_counter()
        self._perform(self._core.schedule(self._now()))
        computed = time.perf_counter()
        self._protocol.receive(self._plans.popleft())
        result = self._protocol.answer()
        answered = time.perf_counter()
        self._perform(self._core.handle(StepAnswered(_INCARNATION, result), self._now()))
        return computed - planned + time.perf_counter() - answered

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToReplica(_, StepPlan() as plan):
                    self._plans.append(plan)
                case SendToReplica(_, message):
                    self._protocol.receive(message)
                case SendToFrontend(_, Deltas(_, deltas)):
                    for delta in deltas:
                        self._streams[delta.request_id].arrived(len(delta.token_ids), self._now())
                case SendToFrontend(_, Rejected() as rejected):
                    raise RuntimeError(f"{rejected.request_id} was rejected: {rejected.detail}")

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _stats(self) -> ReplicaStats:
        return replace(self._core.replicas[_INCARNATION].stats)


def _sampling(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=job.temperature, num_sequences=job.num_sequences, seed=1, max_tokens=job.num_tokens
    )
