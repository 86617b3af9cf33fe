"""Holds a benchmark's findings as numbers, and writes them as a table."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from octavo.bench.figures import FIGURES, CaseFigure, CaseWork, Floor, Yardsticks
from octavo.bench.measurement import Measurement
from octavo.bench.table import line
from octavo.bench.whole.token_cost import TokenCost, to_lines

ALONE = "worker alone"
WHOLE = "all processes"
OPENVINO = "OpenVINO GenAI"
LLAMA_CPP = "llama.cpp"
PLAIN = "bf16"


@dataclass(frozen=True)
class Runs:
    """Holds all that one system did with `threads` threads: its `measurements` by case, in the order of the rounds.

    `format` is that of the weights, whose size a step reads is `weight_bytes`; `peers` names those of other systems
    with which its speed is compared, by system. `about` says how the system was set. `memory`, in bytes: the `peak` of
    its computing process and, where known, its blocks of keys and values (`kv`). `profile`: milliseconds of a decode
    step by what it does, where asked for.
    """

    name: str
    threads: int
    start_s: float
    format: str = PLAIN
    weight_bytes: int = 0
    peers: dict[str, str] = field(default_factory=dict)
    about: str = ""
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.format}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def has(self, figure: CaseFigure) -> bool:
        """Tells whether the system was asked for the figure's case."""
        return figure.case in self.measurements

    def best(self, figure: CaseFigure) -> Measurement:
        """Returns the run that the machine disturbed least."""
        return min(self.measurements[figure.case], key=figure.seconds)


@dataclass(frozen=True)
class FigureRow:
    """Holds a figure of one system: `value` and its floor in the figure's unit, the former's time over the latter's,
    and the system's speed over that of the worker alone with as many threads, in its own format and in bf16, and over
    the peers' in the format that is nearest, where these ran too."""

    system: str
    threads: int
    format: str
    value: float
    floor: float
    over_floor: float
    to_alone: float | None
    to_plain: float | None
    to_openvino: float | None
    to_llama_cpp: float | None
    others_share: float


@dataclass(frozen=True)
class BenchReport:
    """Holds the whole report. `work` is by case; `yardsticks` are by number of threads, in the order of the rounds;
    `token_costs` are those of all processes around the model, where these ran."""

    settings: dict[str, object]
    work: dict[str, CaseWork]
    yardsticks: dict[int, list[Yardsticks]]
    runs: list[Runs]
    token_costs: list[TokenCost] = field(default_factory=list)

    @property
    def figures(self) -> list[CaseFigure]:
        return [figure for figure in FIGURES if figure.case in self.work]

    def rows(self, figure: CaseFigure) -> list[FigureRow]:
        return [self._row(figure, runs) for runs in self.runs if runs.has(figure)]

    def floor(self, figure: CaseFigure, runs: Runs) -> Floor:
        """Returns the floor of a system by the best that the machine gave in any round, as the runs are the best."""
        yardsticks = Yardsticks.best(self.yardsticks[runs.threads])
        return figure.floor(self.work[figure.case], runs.weight_bytes, yardsticks)

    def _row(self, figure: CaseFigure, runs: Runs) -> FigureRow:
        case, best, floor = self.work[figure.case].case, runs.best(figure), self.floor(figure, runs).seconds
        seconds = figure.seconds(best)

        def to(name: str, form: str | None, threads: int | None = None) -> float | None:
            """Returns the speed over that of a system; None if there is none."""
            others = [one for one in self.runs if (one.name, one.format) == (name, form) and one.has(figure)]
            times = [figure.seconds(one.best(figure)) for one in others if threads in (None, one.threads)]
            return min(times) / seconds if times else None

        return FigureRow(
            system=runs.name,
            threads=runs.threads,
            format=runs.format,
            value=figure.shown(seconds, case),
            floor=figure.shown(floor, case),
            over_floor=seconds / floor,
            to_alone=to(ALONE, runs.format, runs.threads),
            to_plain=to(ALONE, PLAIN, runs.threads),
            to_openvino=to(OPENVINO, runs.peers.get(OPENVINO)),
            to_llama_cpp=to(LLAMA_CPP, runs.peers.get(LLAMA_CPP)),
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
            "token_costs": [asdict(cost) for cost in self.token_costs],
        }


_NOTES = """\
x floor: how many times as long as the floor. goal: the same of what the worker alone must reach in bf16 on a quiet
machine, by the floor that was measured there. of alone, of bf16: speed over that of the worker alone in the same format
and in bf16. of OpenVINO, of llama.cpp: speed over theirs in the format that is nearest; goal: as before, beside
OpenVINO. others: the share of all cores' time that other processes took. A figure is the best of its runs, a floor the
best of its rounds."""
_HEADS = ("", "", "x floor", "goal", "of alone", "of bf16", "of OpenVINO", "goal", "of llama.cpp", "others")
_WIDTHS = (38, 16, 9, 7, 10, 9, 13, 7, 14, 8)


def to_text(report: BenchReport) -> str:
    """Formats everything but the single runs."""
    about = [f"{runs.title}: {runs.about}" for runs in report.runs if runs.about]
    figures = (_figure(report, figure) for figure in report.figures)
    costs = to_lines(report.token_costs) if report.token_costs else ()
    parts = [about, [line(_HEADS, _WIDTHS)], *figures, [_NOTES], costs, _best_threads(report), _details(report)]
    return "\n\n".join(text for part in parts if (text := "\n".join(part)))


def _figure(report: BenchReport, figure: CaseFigure) -> Iterator[str]:
    yield f"{figure.case}, {figure.name} ({report.work[figure.case].case.title})"
    several = [runs for runs in report.runs if runs.has(figure)]
    for row, runs in zip(report.rows(figure), several, strict=True):
        yield line(_cells(figure, row, runs), _WIDTHS)
    floors = {(runs.threads, report.floor(figure, runs)): None for runs in several}
    for threads, floor in floors:
        value = figure.shown(floor.seconds, report.work[figure.case].case)
        yield f"  floor with {threads}: {_number(value)} {figure.unit}, {floor.of}"


def _cells(figure: CaseFigure, row: FigureRow, runs: Runs) -> tuple[str, ...]:
    is_plain = runs.format == PLAIN
    return (
        f"  {runs.title}",
        f"{_number(row.value)} {figure.unit}",
        _ratio(row.over_floor),
        _ratio(figure.goal_over_floor if is_plain else None),
        _ratio(row.to_alone),
        _ratio(row.to_plain),
        _ratio(row.to_openvino),
        _ratio(figure.goal_to_openvino if is_plain else None),
        _ratio(row.to_llama_cpp),
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
            several = [runs for runs in report.runs if runs.name == WHOLE and runs.has(figure)]
            for form in dict.fromkeys(runs.format for runs in several):
                of_format = [runs for runs in several if runs.format == form]
                best = min(of_format, key=lambda runs: figure.seconds(runs.best(figure)))
                yield f"best --threads for {figure.case}, {figure.name}, {form} through all processes: {best.threads}"


def _details(report: BenchReport) -> Iterator[str]:
    for runs in report.runs:
        yield f"{runs.title}: ready after {runs.start_s:.1f} s, {_memory(runs)}"
        for figure in report.figures:
            if runs.has(figure) and figure is next(f for f in report.figures if f.case == figure.case):
                yield from _run(figure, runs.best(figure))
        yield from _profile(runs)


def _memory(runs: Runs) -> str:
    text = f"at most {_mib(runs.memory['peak'])} resident"
    if "kv" not in runs.memory:
        return text
    rest = runs.memory["peak"] - runs.weight_bytes - runs.memory["kv"]
    return f"{text}: {_mib(runs.weight_bytes)} weights, {_mib(runs.memory['kv'])} KV blocks, {_mib(rest)} more"


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
