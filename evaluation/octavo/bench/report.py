"""Holds a benchmark's findings as numbers, and writes them as a table."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from octavo.bench.figures import FIGURES, CaseFigure, CaseWork, Floor, Yardsticks
from octavo.bench.measurement import Measurement
from octavo.bench.table import line

ALONE = "worker alone"
WHOLE = "all processes"
OPENVINO = "OpenVINO GenAI"


@dataclass(frozen=True)
class Runs:
    """Holds all that one system did with `threads` threads: its `measurements` by case, in the order of the rounds.

    `memory`, in bytes: the `peak` of its computing process and, where known, its blocks of keys and values (`kv`).
    `profile`: milliseconds of a decode step by what it does, where asked for.
    """

    name: str
    threads: int
    start_s: float
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def best(self, figure: CaseFigure) -> Measurement:
        """Returns the run that the machine disturbed least."""
        return min(self.measurements[figure.case], key=figure.seconds)


@dataclass(frozen=True)
class FigureRow:
    """Holds a figure of one system: `value` and its floor in the figure's unit, the former's time over the latter's,
    and the system's speed over that of the worker alone with as many threads and over OpenVINO's, where these ran
    too."""

    system: str
    threads: int
    value: float
    floor: float
    over_floor: float
    to_alone: float | None
    to_openvino: float | None
    others_share: float


@dataclass(frozen=True)
class BenchReport:
    """Holds the whole report. `work` is by case; `yardsticks` are by number of threads, in the order of the rounds."""

    settings: dict[str, object]
    work: dict[str, CaseWork]
    yardsticks: dict[int, list[Yardsticks]]
    runs: list[Runs]

    @property
    def figures(self) -> list[CaseFigure]:
        return [figure for figure in FIGURES if figure.case in self.work]

    def rows(self, figure: CaseFigure) -> list[FigureRow]:
        return [self._row(figure, runs) for runs in self.runs]

    def floor(self, figure: CaseFigure, threads: int) -> Floor:
        """Returns the floor by the best that the machine gave in any round, as the runs are the best."""
        return figure.floor(self.work[figure.case], Yardsticks.best(self.yardsticks[threads]))

    def _row(self, figure: CaseFigure, runs: Runs) -> FigureRow:
        case, best, floor = self.work[figure.case].case, runs.best(figure), self.floor(figure, runs.threads).seconds
        seconds = figure.seconds(best)
        alone = (other for other in self.runs if (other.name, other.threads) == (ALONE, runs.threads))
        openvino = (other for other in self.runs if other.name == OPENVINO)
        return FigureRow(
            system=runs.name,
            threads=runs.threads,
            value=figure.shown(seconds, case),
            floor=figure.shown(floor, case),
            over_floor=seconds / floor,
            to_alone=_least_seconds(figure, alone, seconds),
            to_openvino=_least_seconds(figure, openvino, seconds),
            others_share=best.others_share,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "settings": self.settings,
            "figures": [
                {"case": figure.case, "name": figure.name, "unit": figure.unit, "rows": [asdict(row) for row in rows]}
                for figure, rows in ((figure, self.rows(figure)) for figure in self.figures)
            ],
            "steps": {
                case: [(step.tokens, step.logit_rows) for step in work.steps] for case, work in self.work.items()
            },
            "yardsticks": {threads: [asdict(one) for one in several] for threads, several in self.yardsticks.items()},
            "runs": [asdict(runs) for runs in self.runs],
        }


def _least_seconds(figure: CaseFigure, others: Iterable[Runs], seconds: float) -> float | None:
    """Returns the seconds of the fastest of `others`, over `seconds`; None if there is none."""
    least = min((figure.seconds(other.best(figure)) for other in others), default=None)
    return None if least is None else least / seconds


_NOTES = """\
x floor: how many times as long as the floor. goal: the same of what the worker alone must reach on a quiet machine,
by the floor that was measured there. of alone, of OpenVINO: speed over theirs; goal: as before. others: the share of
all cores' time that other processes took. A figure is the best of its runs, a floor the best of its rounds."""
_HEADS = ("", "", "x floor", "goal", "of alone", "of OpenVINO", "goal", "others")
_WIDTHS = (30, 20, 9, 7, 10, 13, 7, 9)


def to_text(report: BenchReport) -> str:
    """Formats everything but the single runs."""
    figures = (_figure(report, figure) for figure in report.figures)
    parts = [[line(_HEADS, _WIDTHS)], *figures, [_NOTES], _best_threads(report), _details(report)]
    return "\n\n".join(text for part in parts if (text := "\n".join(part)))


def _figure(report: BenchReport, figure: CaseFigure) -> Iterator[str]:
    yield f"{figure.case}, {figure.name} ({report.work[figure.case].case.title})"
    for row, runs in zip(report.rows(figure), report.runs, strict=True):
        yield line(_cells(figure, row, runs), _WIDTHS)
    for threads in sorted(report.yardsticks):
        floor = report.floor(figure, threads)
        value = figure.shown(floor.seconds, report.work[figure.case].case)
        yield f"  floor with {threads}: {_number(value)} {figure.unit}, {floor.of}"


def _cells(figure: CaseFigure, row: FigureRow, runs: Runs) -> tuple[str, ...]:
    return (
        f"  {runs.title}",
        f"{_number(row.value)} {figure.unit}",
        _ratio(row.over_floor),
        _ratio(figure.goal_over_floor),
        _ratio(row.to_alone),
        _ratio(row.to_openvino),
        _ratio(figure.goal_to_openvino),
        f"{row.others_share:.0%}",
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _best_threads(report: BenchReport) -> Iterator[str]:
    """Says for each figure whether the cores are better left to the worker, or one of them to the frontend and the
    scheduler."""
    if len(report.yardsticks) > 1:
        for figure in report.figures:
            rows = [row for row in report.rows(figure) if row.system == WHOLE]
            if rows:
                best = min(rows, key=lambda row: row.over_floor * report.floor(figure, row.threads).seconds)
                yield f"best --threads for {figure.case}, {figure.name}, through all processes: {best.threads}"


def _details(report: BenchReport) -> Iterator[str]:
    weight_bytes = next(iter(report.work.values())).weight_bytes
    for runs in report.runs:
        yield f"{runs.title}: ready after {runs.start_s:.1f} s, {_memory(runs, weight_bytes)}"
        for figure in report.figures:
            if runs.measurements and figure is next(f for f in report.figures if f.case == figure.case):
                yield from _run(figure, runs.best(figure))
        yield from _profile(runs)


def _memory(runs: Runs, weight_bytes: int) -> str:
    text = f"at most {_mib(runs.memory['peak'])} resident"
    if "kv" not in runs.memory:
        return text
    rest = runs.memory["peak"] - weight_bytes - runs.memory["kv"]
    return f"{text}: {_mib(weight_bytes)} weights, {_mib(runs.memory['kv'])} KV blocks, {_mib(rest)} more"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _run(figure: CaseFigure, run: Measurement) -> Iterator[str]:
    yield (
        f"  {figure.case}: {run.wall_s:.2f} s in {run.steps} steps, first token median {run.ttft_ms:.0f} ms,"
        f" worst {run.ttft_ms_worst:.0f} ms"
    )
    if run.stages:
        yield "    time by stage  " + "  ".join(f"{name} {share:.1%}" for name, share in run.stages.items())
    if run.cpu_s:
        yield "    CPU seconds    " + "  ".join(f"{name} {seconds:.2f}" for name, seconds in run.cpu_s.items())


def _profile(runs: Runs) -> Iterator[str]:
    if runs.profile:
        total = sum(runs.profile.values())
        yield f"  a decode step, profiled: {total:.1f} ms"
        for name, milliseconds in runs.profile.items():
            yield f"    {milliseconds:8.2f} ms  {milliseconds / total:6.1%}  {name}"
