"""Runs the same jobs on real processes and in a simulation, and finds the part of the difference that is not the
worker's.

On a machine whose cores all compute the model, whatever frontend, scheduler and clients do delays the worker: so much
for every step, and so much for every token of one. Both are measured on batches of equal requests, as what steps took
longer than the calibrated worker alone needs for them.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.loadgen.report import make_report
from octavo.loadgen.servers import Asking, Secrets, ServerAddress
from octavo.loadgen.session import LoadRun, Session, Side
from octavo.runtime.models.step_times import Calibration
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator.cluster_options import calibrated
from octavo.simulator.engine import Cluster, Simulation
from octavo.testbed.stack import Stack
from octavo.worker.calibrate.fit import least_costs
from octavo.workload.job import Job
from octavo.workload.measures import Summary, summarise

_PROMPT_TOKENS = 32
_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Pipeline:
    """Seconds that are not the calibrated worker's: `front_s` of every answer, from the client to the scheduler and
    back; `step_s` of every step that computes; `sampled_s` of every token."""

    front_s: float = 0.0
    step_s: float = 0.0
    sampled_s: float = 0.0


@dataclass(frozen=True)
class RunFigures:
    """Holds a run, with the steps that the worker took in it and the seconds it was busy, as far as it counts them."""

    summary: Summary
    steps: int
    busy_s: float
    late_s: float = 0.0


class Server:
    """Serves jobs by real processes, asked over gRPC. No prompt comes twice."""

    def __init__(self, stack: Stack, vocab_size: int) -> None:
        self._stack = stack
        self._vocab_size = vocab_size
        self._runs = 0

    def run(self, jobs: Sequence[Job]) -> RunFigures:
        """Sends every job when it comes. Raises `RuntimeError` if one fails, or had been computed before."""
        self._runs += 1
        asking = Asking(vocab_size=self._vocab_size, seed=self._runs, temperature=_TEMPERATURE)
        side = Side(ServerAddress.parse(self._stack.address), asking, Secrets())
        before = self._worker()
        asyncio.run(Session(jobs).run([side]))
        after = self._worker()
        [run] = side.runs
        _check(run)
        report = make_report([run])
        late_s = report.lag.p99 if report.lag else 0.0
        return RunFigures(report.summary, after[0] - before[0], after[1] - before[1], late_s)

    def _worker(self) -> tuple[int, float]:
        worker = self._stack.load().workers[0]
        return worker.steps, (worker.times.prepare_us + worker.times.model_us + worker.times.sample_us) / 1e6


def _check(run: LoadRun) -> None:
    for record in run.records:
        if record.failure or record.is_short:
            raise RuntimeError(f"a request failed: {record.failure or 'it got fewer tokens than it asked for'}")
        if record.cached_tokens:
            raise RuntimeError(f"{record.cached_tokens} of a prompt's tokens had been computed before")


def simulate(jobs: Sequence[Job], calibration: Calibration, pipeline: Pipeline) -> RunFigures:
    """Simulates `jobs`, which come in their order, in virtual time: on a replica as calibrated behind such a
    pipeline."""
    worker = calibrated(calibration)
    replica = replace(worker, latency=calibration.times.slowed(pipeline.step_s, pipeline.sampled_s))
    # What comes later at the scheduler by all of the way there and back is answered as much later at the client.
    later = [replace(job, arrival_s=job.arrival_s + pipeline.front_s) for job in jobs]
    outcome = Simulation(Cluster(SchedulerConfig(), [replica])).run(later)
    served = [replace(each, job=job) for each, job in zip(outcome.served, jobs, strict=True)]
    return RunFigures(
        summarise(served, outcome.gaps, outcome.seconds), outcome.steps, outcome.busy_share * outcome.seconds
    )


def measure_pipeline(
    server: Server, calibration: Calibration, *, batches: Sequence[int], num_tokens: int, rounds: int
) -> Pipeline:
    """Estimates what the other processes add, from batches of as many requests at once as `batches` says, of
    `num_tokens` each, and from single requests of one token."""
    alone = [Job(0.0, _PROMPT_TOKENS, 1)]
    for count in (1, max(batches)):
        server.run(count * [Job(0.0, _PROMPT_TOKENS, 4)])
    first_s = statistics.median(_first_token_s(server.run(alone)) for _ in range(3 * rounds))
    gaps = [[_gap_s(server.run(_batch(count, num_tokens))) for count in batches] for _ in range(rounds)]
    measured = [statistics.median(each) for each in zip(*gaps, strict=True)]
    expected = [_gap_s(simulate(_batch(count, num_tokens), calibration, Pipeline())) for count in batches]
    step_s, sampled_s = _per_step_and_token(batches, np.subtract(measured, expected).tolist(), expected)
    without_front = simulate(alone, calibration, Pipeline(0.0, step_s, sampled_s))
    return Pipeline(max(first_s - _first_token_s(without_front), 0.0), step_s, sampled_s)


def _per_step_and_token(batches: Sequence[int], extra_s: list[float], expected_s: list[float]) -> tuple[float, float]:
    """Returns the seconds per step and per token that explain `extra_s`: least squares of the errors as shares of
    `expected_s`."""
    weights = 1 / np.array(expected_s)
    quantities = np.array([[1.0, count] for count in batches]) * weights[:, None]
    step_s, sampled_s = least_costs(quantities, np.array(extra_s) * weights).tolist()
    return step_s, sampled_s


def _batch(count: int, num_tokens: int) -> list[Job]:
    return count * [Job(0.0, _PROMPT_TOKENS, num_tokens)]


def _first_token_s(measured: RunFigures) -> float:
    assert measured.summary.ttft is not None, "a first token came"
    return measured.summary.ttft.p50


def _gap_s(measured: RunFigures) -> float:
    """The middle one: before it, some wait for the prompts of others, by when each came."""
    assert measured.summary.itl is not None, "more than one token came"
    return measured.summary.itl.p50
