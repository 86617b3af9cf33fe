"""Measures how far the simulator is from reality: `python -m octavo.bench.whole.simulator_validation`.

In each of some turns, for each of three request rates: calibrates a worker on this machine's cores, measures what the
other processes on the same cores add, and serves one workload twice: by real processes, asked over gRPC by an open
loop, and in simulation. Figures are means over the turns, whose real runs differ too. Exit status 1 if a goal is
missed. Nothing else should run on the machine; two turns take about thirteen minutes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.whole.simulator_pipeline import Pipeline, RunFigures, Server, measure_pipeline, simulate
from octavo.frontend.text.model_defaults import read_model_defaults
from octavo.loadgen.report import MAX_LAG_S
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.runtime.models.step_times import Calibration, read_calibration
from octavo.testbed.stack import Stack
from octavo.workload.job import Job
from octavo.workload.synthetic import AtOnce, Dataset, LogNormal, Poisson, Workload

# ShareGPT's shape at about a third of its size, so that enough requests end in a minute on two cores.
LENGTHS = Dataset("a third of ShareGPT", LogNormal(54.0, 1.12, 4, 341), LogNormal(113.0, 1.02, 4, 341), 683)
# Shares of the rate that the simulated worker sustains.
LOADS = (0.3, 0.5, 0.7)
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
    lines = [f"{head}{'real':>12}{'simulated':>12}{'error':>9}{'goal':>7}{'spread':>9}"]
    width = lines[0].index(":") + 1
    for each in row.figures():
        scale = 1.0 if each.metric in _RATES else 1e3
        name = each.metric if each.metric in _RATES else f"{each.metric}, ms"
        mark = "" if each.is_met else "  missed"
        lines.append(
            f"  {name:{width - 2}}{scale * each.real:12.2f}{scale * each.simulated:12.2f}{each.error:+9.1%}"
            f"{each.goal:7.0%}{each.spread:9.1%}{mark}"
        )
    for turn in row.turns:
        lines.append(
            f"  {'ms of a step':{width - 2}}{_step_ms(turn.real):12.2f}{_step_ms(turn.simulated):12.2f}"
            f"   {_pipeline_text(turn.pipeline)}"
        )
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
