"""The worker alone: the production scheduler's core and the model in one process, no socket between them."""

import time
from collections import deque

from octavo.bench.measurement import Measurement, Stream, measured
from octavo.bench.scheduler_alone import make_request
from octavo.bench.workloads import Case
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
from octavo.scheduler.scheduler import Scheduler
from octavo.wire.requests import Deltas, Rejected
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import StepPlan, WorkerHello
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import Runner

_FRONTEND = 1
_INCARNATION = 1


class InProcess:
    """One replica, driven step by step."""

    def __init__(self, runner: Runner) -> None:
        # A repeated case must not find its own prompts.
        self._core = Scheduler(SchedulerConfig(max_steps_in_flight=1, prefix_caching=False), epoch=1)
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
        before = self._stats()
        self._began = time.perf_counter()
        self._streams = {f"{case.name}-{i}": Stream() for i in range(len(case.jobs))}
        for request_id, job in zip(self._streams, case.jobs, strict=True):
            sampling = SamplingParams(max_tokens=job.num_tokens)
            request = make_request(request_id, job.prompt_token_ids, sampling, self._fingerprint)
            self._perform(self._core.handle(RequestSubmitted(_FRONTEND, request), self._now()))
        scheduling = 0.0
        while self._core.groups:
            scheduling += self._step()
        wall = self._now()
        prepare, model, sample, steps = (after - b for after, b in zip(self._stats(), before, strict=True))
        stages = {"scheduler": scheduling, "prepare": prepare / 1e6, "model": model / 1e6, "sample": sample / 1e6}
        return measured(case, "worker alone", wall, list(self._streams.values()), steps, stages)

    def _step(self) -> float:
        """Seconds the scheduler took."""
        planned = time.perf_counter()
        self._perform(self._core.schedule(self._now()))
        computed = time.perf_counter()
        result = self._protocol.receive(self._plans.popleft())
        assert result is not None
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

    def _stats(self) -> tuple[int, int, int, int]:
        stats = self._core.replicas[_INCARNATION].stats
        return stats.prepare_us, stats.model_us, stats.sample_us, stats.steps
