"""Measures how far the simulator is from reality: `python -m octavo.bench.whole.simulator_validation`.

In each of some turns, for each of three request rates: calibrates a worker on this machine's cores, measures what the
other processes on the same cores add, and serves one workload twice: by real processes, asked over gRPC by an open
loop, and in simulation. Figures are means over the turns, whose real runs differ too. Exit status 1 if a goal is
missed. Nothing else should run on the machine; two turns take about thirteen minutes.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.bench.table import line
from octavo.frontend.text.model_defaults import read_model_defaults
from octavo.loadgen.report import MAX_LAG_S, make_report
from octavo.loadgen.servers import Asking, Secrets, ServerAddress
from octavo.loadgen.session import LoadRun, Session, Side
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.runtime.models.step_times import Calibration, read_calibration
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator.cluster_options import calibrated
from octavo.simulator.engine import Cluster, Simulation
from octavo.testbed.stack import Stack
from octavo.worker.calibrate.fit import least_costs
from octavo.workload.job import Job
from octavo.workload.measures import Summary, summarise
from octavo.workload.synthetic import AtOnce, Dataset, LogNormal, Poisson, Workload

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
    gaps = [[_measured_gap_s(server, _batch(count, num_tokens)) for count in batches] for _ in range(rounds)]
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


def _measured_gap_s(server: Server, batch: list[Job]) -> float:
    """Measures until a client was told of a request's tokens one after the other: on a busy machine all may wait for it
    together. Raises `RuntimeError` after ten times."""
    for _ in range(_TRIES):
        measured = server.run(batch)
        if measured.summary.itl is not None:
            return _gap_s(measured)
    raise RuntimeError(
        f"all tokens of each request came at once, {_TRIES} times over: the machine is too busy to measure"
    )


def _gap_s(measured: RunFigures) -> float:
    """The middle one: before it, some wait for the prompts of others, by when each came."""
    assert measured.summary.itl is not None, "more than one token came"
    return measured.summary.itl.p50


# ShareGPT's shape at about a third of its size, so that enough requests end in a minute on two cores.
LENGTHS = Dataset("a third of ShareGPT", LogNormal(54.0, 1.12, 4, 341), LogNormal(113.0, 1.02, 4, 341), 683)
# Shares of the rate that the simulated worker sustains.
LOADS = (0.3, 0.5, 0.7)
_TRIES = 10
# How far figures may be off.
GOAL, GOAL_P99 = 0.15, 0.30
# Enough that no request waits for blocks, few enough that any machine has them.
NUM_BLOCKS = 3072
_FEWEST = 8
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_RATES: dict[str, Callable[[RunFigures], float]] = {
    "requests/s": lambda run: run.summary.requests_per_s,
    "output tokens/s": lambda run: run.summary.output_tokens_per_s,
}


@dataclass(frozen=True)
class ComparedMetric:
    """Holds one metric, seconds or a rate: of each turn, in reality and in simulation."""

    metric: str
    reals: Sequence[float]
    simulateds: Sequence[float]

    @property
    def real(self) -> float:
        return statistics.fmean(self.reals)

    @property
    def simulated(self) -> float:
        return statistics.fmean(self.simulateds)

    @property
    def error(self) -> float:
        return self.simulated / self.real - 1.0

    @property
    def spread(self) -> float:
        """Returns the distance from the lowest turn to the highest real one, as a share of their mean."""
        return (max(self.reals) - min(self.reals)) / self.real

    @property
    def goal(self) -> float:
        return GOAL_P99 if self.metric.endswith("p99") else GOAL

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= self.goal


@dataclass(frozen=True)
class Turn:
    """Holds one workload in reality and in simulation, with the settings of the simulation."""

    calibration: Calibration
    pipeline: Pipeline
    real: RunFigures
    simulated: RunFigures


@dataclass(frozen=True)
class RateRow:
    """Holds all turns at one rate, in requests per second, which is a share of the highest: its `load`."""

    load: float
    rate: float
    turns: list[Turn] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(each.real.summary.requests for each in self.turns)

    def figures(self) -> list[ComparedMetric]:
        metrics = dict(_RATES)
        for metric in ("ttft", "itl", "latency"):
            for statistic in ("p50", "p99"):
                metrics[f"{metric} {statistic}"] = attrgetter(f"summary.{metric}.{statistic}")
        return [
            ComparedMetric(name, [of(each.real) for each in self.turns], [of(each.simulated) for each in self.turns])
            for name, of in metrics.items()
        ]


def validate(model: Path, directory: Path, chosen: argparse.Namespace) -> list[RateRow]:
    """Yields a row for every load, each printed once it is known."""
    settings = {"OCTAVO_NUM_BLOCKS": str(NUM_BLOCKS), "OCTAVO_NUM_CPU_BLOCKS": "64"}
    rows: list[RateRow] = []
    with Stack(model, directory / "s", settings) as stack:
        stack.start_all()
        # One for all of them, so that no prompt was computed before.
        server = Server(stack, read_model_defaults(model).vocab_size)
        for turn, load in product(range(chosen.turns), LOADS):
            # Anew each time: what a shared machine gives changes within minutes. The stack is idle meanwhile.
            calibration = _calibrated(model, directory / "calibration.json", settings)
            batches = [count for count in _BATCHES if count <= chosen.most]
            pipeline = measure_pipeline(
                server, calibration, batches=batches, num_tokens=chosen.tokens, rounds=chosen.rounds
            )
            if not rows:
                most = sustained_rate(calibration, pipeline)
                rows = [RateRow(each, each * most) for each in LOADS]
            row = rows[LOADS.index(load)]
            jobs = workload(row.rate, chosen.seconds, seed=turn)
            simulated = simulate(jobs, calibration, pipeline)
            row.turns.append(Turn(calibration, pipeline, server.run(jobs), simulated))
            if len(row.turns) == chosen.turns:
                print(row_text(row), flush=True)
    return rows


def sustained_rate(calibration: Calibration, pipeline: Pipeline) -> float:
    """Requests per second where a few hundred always wait."""
    jobs = Workload(LENGTHS, AtOnce(), num_requests=400).jobs(seed=0)
    return simulate(jobs, calibration, pipeline).summary.requests_per_s


def workload(rate: float, seconds: float, seed: int) -> list[Job]:
    """Makes about as many requests as come in this time."""
    return Workload(LENGTHS, Poisson(rate), num_requests=max(round(rate * seconds), _FEWEST)).jobs(seed)


def _calibrated(model: Path, out: Path, settings: dict[str, str]) -> Calibration:
    """Calibrates by a process of its own, like the worker that the calibration is about."""
    command = [sys.executable, "-m", "octavo.cli.main", "calibrate", "--model", str(model), "--out", str(out)]
    subprocess.run(command, env={**os.environ, **settings}, check=True)
    return read_calibration(out)


def row_text(row: RateRow) -> str:
    """Writes the figures of `row` as a table."""
    head = f"{row.rate:.2f} requests/s, {row.requests} requests:"
    widths = (len(head), 12, 12, 9, 7, 9)
    lines = [line((head, "real", "simulated", "error", "goal", "spread"), widths)]
    for each in row.figures():
        scale = 1.0 if each.metric in _RATES else 1e3
        name = each.metric if each.metric in _RATES else f"{each.metric}, ms"
        values = f"{scale * each.real:.2f}", f"{scale * each.simulated:.2f}"
        shares = f"{each.error:+.1%}", f"{each.goal:.0%}", f"{each.spread:.1%}"
        lines.append(line((f"  {name}", *values, *shares), widths) + ("" if each.is_met else "  missed"))
    for turn in row.turns:
        steps = f"{_step_ms(turn.real):.2f}", f"{_step_ms(turn.simulated):.2f}"
        lines.append(f"{line(('  ms of a step', *steps), widths)}   {_pipeline_text(turn.pipeline)}")
        if turn.real.late_s > MAX_LAG_S:
            late = f"requests were sent late ({turn.real.late_s:.3f} s, p99)"
            lines.append(f"  {late}: is the machine busy with something else?")
    return "\n".join(lines)


def _pipeline_text(pipeline: Pipeline) -> str:
    return (
        f"beside the worker {1e3 * pipeline.front_s:.2f} ms per answer, {1e3 * pipeline.step_s:.2f} per step,"
        f" {1e3 * pipeline.sampled_s:.3f} per token"
    )


def _step_ms(run: RunFigures) -> float:
    return 1e3 * run.busy_s / max(run.steps, 1)


def to_json(rows: Sequence[RateRow]) -> dict[str, Any]:
    """Returns the rows and their machine as JSON values."""
    found = []
    for row in rows:
        figures = [
            {**asdict(each), "error": each.error, "goal": each.goal, "spread": each.spread} for each in row.figures()
        ]
        found.append({**msgspec.to_builtins(row), "requests": row.requests, "figures": figures})
    return {"machine": machine(), "rows": found}


def machine() -> dict[str, object]:
    """Describes the machine for which the figures hold."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0))}


def write(found: dict[str, Any], path: Path) -> None:
    """Writes the rows beside what others have written there."""
    there = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    path.write_bytes(msgspec.json.format(msgspec.json.encode({**there, "validation": found}), indent=2) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of the batches by which the pipeline is measured")
    parser.add_argument("--tokens", type=int, default=48, help="of each request of them")
    parser.add_argument("--most", type=int, default=64, help="requests of the largest of them")
    parser.add_argument("--json", type=Path, help="write the figures here, beside others")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        rows = validate(resolve_model(chosen.model, "auto"), Path(directory), chosen)
    if chosen.json:
        write(to_json(rows), chosen.json)
    met = [each.is_met for row in rows for each in row.figures()]
    print(f"{sum(met)} of {len(met)} figures within their goals ({GOAL:.0%}; {GOAL_P99:.0%} for p99)")
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
