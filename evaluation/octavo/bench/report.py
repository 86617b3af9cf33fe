"""What a benchmark found, as numbers; `tables` puts it into words."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from octavo.bench.figures import FIGURES, Figure, Floor, Work
from octavo.bench.floors import Yardsticks
from octavo.bench.measurement import Measurement

ALONE = "worker alone"
WHOLE = "all processes"
OPENVINO = "OpenVINO GenAI"


@dataclass(frozen=True)
class Runs:
    """All that one system did with `threads` threads: its `measurements` by case, in the order of the rounds.

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

    def best(self, figure: Figure) -> Measurement:
        """The run that the machine disturbed least."""
        return min(self.measurements[figure.case], key=figure.seconds)


@dataclass(frozen=True)
class Row:
    """One system's figure: `value` and its floor in the figure's unit, the former's time over the latter's, and this
    one's speed over that of the worker alone with as many threads and over OpenVINO's, where they ran too."""

    system: str
    threads: int
    value: float
    floor: float
    over_floor: float
    to_alone: float | None
    to_openvino: float | None
    others_share: float


@dataclass(frozen=True)
class Report:
    """`work` is by case; `yardsticks` are by number of threads, in the order of the rounds."""

    settings: dict[str, object]
    work: dict[str, Work]
    yardsticks: dict[int, list[Yardsticks]]
    runs: list[Runs]

    @property
    def figures(self) -> list[Figure]:
        return [figure for figure in FIGURES if figure.case in self.work]

    def rows(self, figure: Figure) -> list[Row]:
        return [self._row(figure, runs) for runs in self.runs]

    def floor(self, figure: Figure, threads: int) -> Floor:
        """By the best that the machine gave in any round, as the runs are the best."""
        return figure.floor(self.work[figure.case], Yardsticks.best(self.yardsticks[threads]))

    def _row(self, figure: Figure, runs: Runs) -> Row:
        case, best, floor = self.work[figure.case].case, runs.best(figure), self.floor(figure, runs.threads).seconds
        seconds = figure.seconds(best)
        alone = (other for other in self.runs if (other.name, other.threads) == (ALONE, runs.threads))
        openvino = (other for other in self.runs if other.name == OPENVINO)
        return Row(
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


def _least_seconds(figure: Figure, others: Iterable[Runs], seconds: float) -> float | None:
    """The seconds of the fastest of `others`, over `seconds`; None if there is none."""
    least = min((figure.seconds(other.best(figure)) for other in others), default=None)
    return None if least is None else least / seconds
