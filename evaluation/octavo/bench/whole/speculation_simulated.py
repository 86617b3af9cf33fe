"""Measures how far `octavo simulate` is from real processes where they speculate:
`python -m octavo.bench.whole.speculation_simulated [--works ...] [--batches ...]`.

Both stacks of `octavo.bench.whole.speculation` serve a work. Then the worker is calibrated, and the answers in the
event log of the stack that guesses are simulated again on such a worker, with guesses and without: so many at a time,
with the prompts in the cache as in reality. What is compared is the gain, in which the machine's speed is no factor.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.formats import read_format
from octavo.bench.table import table
from octavo.bench.whole.speculation import SETTINGS, Pair, measure
from octavo.bench.whole.speculation_works import WORKS
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.runtime.models.step_times import Calibration, read_calibration
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator.cluster_options import calibrated
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.simulator.recorded import jobs_of_log
from octavo.workload.job import Job

# Requests come when all prompts are computed.
_PROMPTS_S = 1e4


@dataclass(frozen=True)
class Compared:
    """Holds one work at a batch: tokens per second by setting, measured and simulated, and tokens of a step with
    guesses in simulation."""

    work: str
    batch: int
    measured: dict[str, float]
    simulated: dict[str, float]
    tokens_per_step: float

    @property
    def gains(self) -> tuple[float, float]:
        return self.measured["auto"] / self.measured["off"], self.simulated["auto"] / self.simulated["off"]


def simulate(jobs: Sequence[Job], batch: int, calibration: Calibration, setting: str) -> SimulationOutcome:
    """Simulates jobs, so many at a time, whose prompts were computed before."""
    prompts = [replace(job, arrival_s=0.0, output_tokens=1) for job in jobs]
    answers = [replace(job, arrival_s=_PROMPTS_S) for job in jobs]
    config = SchedulerConfig(max_num_seqs=batch, speculation="off" if setting == "off" else "auto")
    return Simulation(Cluster(config, [calibrated(calibration)])).run([*prompts, *answers])


def tokens_per_s(outcome: SimulationOutcome, num_jobs: int) -> float:
    """Returns the tokens per second of the answers, which came last."""
    return sum(each.num_tokens for each in outcome.served[num_jobs:]) / (outcome.seconds - _PROMPTS_S)


def compare(model: Path, options: argparse.Namespace) -> list[Compared]:
    """Measures all cells, calibrates, and simulates them."""
    cells = [(work, batch) for batch in options.batches for work in options.works]
    with Pair(model, options.format, options.threads, options.blocks) as pair:
        found = [measure(pair, work, batch, options.rounds, options.tokens, options.seed) for work, batch in cells]
        # Ends the schedulers, whose logs are whole then.
        for _ in pair.records("auto"):
            pass
        jobs = jobs_of_log(pair.log("auto"))
        calibration = _calibrated(model, pair.log("calibration"), options)
    compared, first = [], 0
    for (work, batch), rounds in zip(cells, found, strict=True):
        count = len(rounds["auto"][0].answers)
        # Each prompt was computed once, and then answered in each round.
        first += count * (1 + options.rounds)
        answered = jobs[first - count : first]
        outcomes = {setting: simulate(answered, batch, calibration, setting) for setting in SETTINGS}
        compared.append(
            Compared(
                work,
                batch,
                {setting: max(each.tokens_per_s for each in rounds[setting]) for setting in SETTINGS},
                {setting: tokens_per_s(outcomes[setting], count) for setting in SETTINGS},
                outcomes["auto"].guesses.tokens_per_step,
            )
        )
    return compared


def _calibrated(model: Path, out: Path, options: argparse.Namespace) -> Calibration:
    command = [sys.executable, "-m", "octavo.cli.main", "calibrate", "--model", str(model), "--out", str(out)]
    settings = {**(options.format.settings or {}), "num_blocks": str(options.blocks), "device": "cpu"}
    if options.threads is not None:
        settings["threads"] = str(options.threads)
    environment = {f"OCTAVO_{name.upper()}": value for name, value in settings.items()}
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    return read_calibration(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=["edit"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of each request, at most")
    parser.add_argument("--threads", type=int, help="of the worker; its own choice by default")
    parser.add_argument("--format", type=read_format, default="bf16", help="of the weights: bf16, q8_0, ...")
    parser.add_argument("--blocks", type=int, default=4096, help="of 16 tokens, of each worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    heads = ("work", "batch", "off", "auto", "gain", "off, simulated", "auto", "gain", "tokens", "ratio")
    rows: list[tuple[str, ...]] = [heads]
    for each in compare(resolve_model(options.model), options):
        real, simulated = each.gains
        measured = [f"{each.measured[setting]:.1f}" for setting in SETTINGS]
        told = [f"{each.simulated[setting]:.1f}" for setting in SETTINGS]
        rows.append(
            (
                *(each.work, str(each.batch), *measured, f"{real:.2f}", *told, f"{simulated:.2f}"),
                *(f"{each.tokens_per_step:.2f}", f"{simulated / real:.2f}"),
            )
        )
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
