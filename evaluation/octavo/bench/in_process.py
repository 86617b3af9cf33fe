"""The worker alone: the production scheduler's core and the model in one process, no socket between them."""

import os
from dataclasses import replace

from octavo.bench.engine import Engine
from octavo.bench.measurement import Measurement, Stream, measured
from octavo.bench.parts.scheduler_alone import make_request
from octavo.bench.whole.processes import Meter
from octavo.bench.workloads import Case, Job
from octavo.scheduler.core.replica import ReplicaStats
from octavo.wire.requests import Delta
from octavo.wire.sampling import SamplingParams
from octavo.worker.runner import Runner


class InProcess:
    """One replica, driven step by step: no plan is made before the result of the one before."""

    def __init__(self, runner: Runner) -> None:
        self._engine = Engine(runner, self._hear)
        self._streams: dict[str, Stream] = {}
        self._began = 0.0

    def run(self, case: Case) -> Measurement:
        """All of the case's requests, submitted at once."""
        meter, steps = Meter({"worker": os.getpid()}), self._stats().steps
        self.submit(case)
        stage_s = self.advance()
        wall, cpu, steps = self._now(), meter.cpu_s(), self._stats().steps - steps
        return measured(case, wall, list(self._streams.values()), steps, stage_s, cpu)

    def submit(self, case: Case) -> None:
        """Nothing may be running."""
        self._began = self._engine.now()
        self._streams = {f"{case.name}-{i}": Stream() for i in range(len(case.jobs))}
        for request_id, job in zip(self._streams, case.jobs, strict=True):
            self._engine.submit(
                make_request(request_id, job.prompt_token_ids, _sampling(job), self._engine.fingerprint)
            )

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return self._engine.is_idle

    def advance(self, num_steps: int | None = None) -> dict[str, float]:
        """Runs so many steps, or until all is done; the seconds that each stage took."""
        before, scheduling, left = self._stats(), 0.0, num_steps
        while not self.is_idle and left != 0:
            scheduling += self._engine.step()
            left = None if left is None else left - 1
        after = self._stats()
        return {
            "scheduler": scheduling,
            "prepare": (after.prepare_us - before.prepare_us) / 1e6,
            "model": (after.model_us - before.model_us) / 1e6,
            "sample": (after.sample_us - before.sample_us) / 1e6,
        }

    def _hear(self, delta: Delta) -> None:
        self._streams[delta.request_id].arrived(len(delta.token_ids), self._now())

    def _now(self) -> float:
        return self._engine.now() - self._began

    def _stats(self) -> ReplicaStats:
        return replace(self._engine.replica.stats)


def _sampling(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=job.temperature, num_sequences=job.num_sequences, seed=1, max_tokens=job.num_tokens
    )
