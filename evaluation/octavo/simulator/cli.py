"""Runs the command `octavo simulate`, with its progress on stderr."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from msgspec import structs

from octavo.runtime.options.flags import config_of, fields_of, options_of
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.server.event_log import EventLogError
from octavo.simulator.cell import Restart, SimulationError
from octavo.simulator.cluster_options import CellRoute, cluster_options, read_replica
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.simulator.recorded import jobs_of_log
from octavo.simulator.report import SimulationReport, make_plan, make_report, plan_text, replicas_text, report_text
from octavo.simulator.speculation import Acceptance
from octavo.wire.steps import WorkerRole
from octavo.workload.job import Job
from octavo.workload.measures import Targets, time_text
from octavo.workload.options import flags_given, read_jobs, workload_options

_LINE_EVERY_S: Final = 10.0
_TERMINAL_EVERY_S: Final = 0.5


class SimulationProgress:
    """Shows people how much time has passed in simulations. What ends soon shows nothing."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._every_s = _TERMINAL_EVERY_S if self._on_terminal else _LINE_EVERY_S
        self._label = ""
        self._began_at = self._shown_at = time.perf_counter()

    def begin(self, label: str, end_s: float) -> None:
        """Begins another simulation, in which requests come until `end_s`."""
        self._label = f"{label}: {{}} simulated, requests come until {time_text(end_s)}"
        self._began_at = self._shown_at = time.perf_counter()

    def end(self) -> float:
        """Takes the line away and returns the wall time of the simulation, in seconds."""
        if self._on_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)
        return time.perf_counter() - self._began_at

    def __call__(self, now: float) -> None:
        """Shows that the simulation has come to the virtual time `now`, in seconds."""
        if time.perf_counter() - self._shown_at >= self._every_s:
            self._shown_at = time.perf_counter()
            line = self._label.format(time_text(now))
            click.echo(f"\r\x1b[K{line}" if self._on_terminal else line, err=True, nl=not self._on_terminal)


_CONFIG = fields_of(SchedulerConfig).keys()
_FILE = click.Path(dir_okay=False, path_type=Path)


def _targets(context: click.Context, parameter: click.Parameter, text: str | None) -> Targets | None:
    try:
        return None if text is None else Targets.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _restarts(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> list[Restart]:
    try:
        restarts = sorted(map(Restart.parse, texts), key=lambda restart: restart.at_s)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    if any(later.at_s <= one.at_s + one.down_s for one, later in pairwise(restarts)):
        raise click.BadParameter("a worker cannot end again before it is back", context, parameter)
    return restarts


@click.command(context_settings={"show_default": True})
@cluster_options
@click.option("--replicas", type=click.IntRange(1, 100_000), show_default="1", help="Of all cells together.")
@click.option("--cells", type=click.IntRange(min=1), default=1, help="Schedulers that share the replicas.")
@click.option("--prefill", type=click.IntRange(min=0), default=0, help="Of the replicas those for prompts alone.")
@click.option("--decode", type=click.IntRange(min=0), default=0, help="Of them those for what follows prompts.")
@click.option("--processes", type=click.IntRange(min=1), default=1, help="Processes that share the cells.")
@click.option(
    "--link", type=click.FloatRange(0.0, 60.0), default=0.0, help="Seconds of a message from scheduler to worker."
)
@click.option("--plan", "targets", callback=_targets, help="Search the fewest replicas: ttft_p99<1s,itl_p99<50ms.")
@click.option("--max-replicas", type=click.IntRange(min=1), default=1024, help="Where --plan gives up.")
@click.option(
    "--restart",
    "restarts",
    multiple=True,
    callback=_restarts,
    help="AT:DOWN, in seconds: when a worker of each cell ends, and after how long it is back. May be given again.",
)
@click.option("--horizon", type=click.FloatRange(min=0.0, min_open=True), help="Stop after so many simulated seconds.")
@click.option("--sample-every", type=click.FloatRange(min=0.0, min_open=True), default=1.0, help="Seconds.")
@click.option("--event-log", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A scheduler's.")
@click.option("--json", "file", type=_FILE, help="Write the report here too.")
@click.option(
    "--acceptance",
    help="Chances of speculation's guesses, as 0.8,0.9,0.95: of the first, the second, and all further ones. Without,"
    " there are none, but for what an event log says again.",
)
@click.option(
    "--proposals",
    type=click.FloatRange(0.0, 1.0),
    show_default="1",
    help="The share of a sequence's steps for which there are guesses, with --acceptance.",
)
@workload_options
@options_of(SchedulerConfig)
def simulate(
    replicas: int | None,
    cells: int,
    prefill: int,
    decode: int,
    processes: int,
    link: float,
    targets: Targets | None,
    max_replicas: int,
    restarts: list[Restart],
    horizon: float | None,
    sample_every: float,
    event_log: Path | None,
    file: Path | None,
    acceptance: str | None,
    proposals: float | None,
    **settings: Any,
) -> None:
    """Tell how a load would run: the production scheduler plans its steps, in a time of its own, and workers take as
    long for them as their model and GPU would, or as a worker that was calibrated.

    The same flags and the same --seed give the same report.
    """
    if targets is not None and replicas is not None:
        raise click.UsageError("--plan searches the number of replicas, so it does not go with --replicas")
    if cells > (least := replicas or 1) and targets is None:
        raise click.UsageError(f"--cells {cells} need as many --replicas at least, not {least}")
    if targets is not None and horizon is not None:
        raise click.UsageError("--plan looks at whole runs, so it does not go with --horizon")
    if targets is not None and cells > max_replicas:
        raise click.UsageError(f"--cells {cells} need as many --max-replicas at least, not {max_replicas}")
    replica = read_replica(settings)
    _check_roles(prefill, decode, least, cells, has_link=replica.peer_link is not None, plans=targets is not None)
    config = config_of(SchedulerConfig, {name: settings.pop(name) for name in _CONFIG})
    chances = _acceptance(acceptance, proposals, event_log)
    jobs = _jobs(settings, event_log)
    simulator = _Simulator(
        config=config,
        replica=replica,
        roles=[WorkerRole.PREFILL] * prefill + [WorkerRole.DECODE] * decode,
        cells=cells,
        processes=processes,
        link_s=link,
        seed=settings["seed"],
        horizon_s=horizon or float("inf"),
        sample_every_s=sample_every,
        targets=targets,
        acceptance=chances,
        restarts=restarts,
    )
    try:
        if targets is not None:
            _plan(simulator, jobs, targets, max_replicas, file)
        else:
            _simulate(simulator, jobs, least, file)
    except SimulationError as error:
        raise click.ClickException(str(error)) from error


def _check_roles(prefill: int, decode: int, replicas: int, cells: int, *, has_link: bool, plans: bool) -> None:
    if not (prefill or decode):
        return
    if plans:
        raise click.UsageError("--plan searches the number of replicas, so it does not go with --prefill and --decode")
    if prefill + decode > replicas or prefill == replicas:
        raise click.UsageError(
            f"of {replicas} --replicas {prefill} cannot be for prompts and {decode} for what follows them: one at least"
            " must compute what follows"
        )
    if prefill % cells or decode % cells:
        raise click.UsageError(f"--prefill and --decode are dealt out to {cells} cells: give multiples of that")
    if not has_link:
        raise click.UsageError("requests move from --prefill to --decode: say with --peer-bandwidth how fast")


def _acceptance(text: str | None, proposals: float | None, event_log: Path | None) -> Acceptance | None:
    if text is None:
        if proposals is not None:
            raise click.UsageError(
                "--proposals says how often there are guesses: say with --acceptance how often these are right"
            )
        return None
    if event_log is not None:
        raise click.UsageError("--event-log says what can be guessed, so it does not go with --acceptance")
    try:
        return Acceptance.parse(text, 1.0 if proposals is None else proposals)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--acceptance'") from error


def _jobs(settings: Mapping[str, Any], event_log: Path | None) -> list[Job]:
    if event_log is None:
        return read_jobs(settings)
    if given := flags_given(settings):
        raise click.UsageError(f"--event-log says all of the requests, so it does not go with {given}")
    try:
        jobs = jobs_of_log(event_log)
    except (EventLogError, OSError, ValueError) as error:
        raise click.UsageError(f"{event_log}: {error}") from error
    if not jobs:
        raise click.UsageError(f"{event_log} has no requests that could be simulated")
    return jobs


@dataclass(frozen=True)
class _Simulator:
    config: SchedulerConfig
    replica: ReplicaSpec
    # Of the first replicas; the others are for all.
    roles: Sequence[WorkerRole]
    cells: int
    processes: int
    link_s: float
    seed: int
    horizon_s: float
    sample_every_s: float
    targets: Targets | None
    acceptance: Acceptance | None
    restarts: Sequence[Restart]

    def run(
        self, jobs: Sequence[Job], replicas: int, passed: Callable[[float], None] | None = None
    ) -> SimulationReport:
        return make_report(self.outcome(jobs, replicas, passed), self.targets)

    def outcome(
        self, jobs: Sequence[Job], replicas: int, passed: Callable[[float], None] | None = None
    ) -> SimulationOutcome:
        cells, num_others = min(self.cells, replicas), replicas - len(self.roles)
        simulation = Simulation(
            Cluster(
                self.config,
                [*(replace(self.replica, role=role) for role in self.roles), *[self.replica] * num_others],
                cells,
                link_s=self.link_s,
                acceptance=self.acceptance,
                restarts=self.restarts,
            ),
            seed=self.seed,
            route=CellRoute(cells) if cells > 1 else None,
            sample_every_s=self.sample_every_s,
            processes=min(self.processes, cells),
        )
        return simulation.run(jobs, self.horizon_s, passed)

    def without_speculation(self) -> "_Simulator":
        return replace(self, config=structs.replace(self.config, speculation="off"))


def _simulate(simulator: _Simulator, jobs: Sequence[Job], replicas: int, file: Path | None) -> None:
    collect_seldom()
    progress = SimulationProgress()
    last_s = jobs[-1].arrival_s if jobs else 0.0
    progress.begin(replicas_text(replicas), last_s)
    outcome = simulator.outcome(jobs, replicas, progress)
    wall_s = progress.end()
    plain = None
    if outcome.guesses.steps:
        progress.begin("without speculation", last_s)
        plain = simulator.without_speculation().outcome(jobs, replicas, progress)
        progress.end()
    report = make_report(outcome, simulator.targets, plain)
    click.echo(report_text(report))
    click.echo(
        f"simulated in {time_text(wall_s)}, {report.summary.seconds / max(wall_s, 1e-9):.4g} times real time;"
        f" {_usage_text()}"
    )
    _write(file, {"replicas": replicas, "seed": simulator.seed, "report": report})


def _plan(simulator: _Simulator, jobs: Sequence[Job], targets: Targets, most: int, file: Path | None) -> None:
    collect_seldom()
    progress = SimulationProgress()

    def run(load: Sequence[Job], replicas: int) -> SimulationReport:
        # Those that never meet: short, for all the time that they take.
        alone = load is not jobs
        used = replace(simulator, sample_every_s=0.0) if alone else simulator
        label = "requests one by one" if alone else replicas_text(replicas)
        progress.begin(label, load[-1].arrival_s if load else 0.0)
        report = used.run(load, replicas, progress)
        progress.end()
        return report

    plan = make_plan(run, jobs, simulator.cells, most, lambda tried: click.echo(f"tried {tried}", err=True))
    click.echo(plan_text(plan, targets, simulator.cells, most))
    _write(file, {"seed": simulator.seed, "plan": plan})
    if plan.replicas is None:
        raise SystemExit(1)


def _usage_text() -> str:
    here, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(used.ru_utime + used.ru_stime for used in (here, others))
    # Linux counts in KiB.
    text = f"it took {time_text(cpu_s)} of CPU time and at most {here.ru_maxrss / 1024:.0f} MiB"
    return f"{text}, and {others.ru_maxrss / 1024:.0f} in the largest other process" if others.ru_maxrss else text


def _write(file: Path | None, document: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from error
