"""Defines the figures by which each case is judged, and their goals. Goals are ratios, since machines are seldom
quiet."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.bench.floors import StepRows, Yardsticks
from octavo.bench.measurement import Measurement
from octavo.bench.workloads import Case


@dataclass(frozen=True)
class Floor:
    """Seconds that a figure would take at least by what the machine gave, and by what of it."""

    seconds: float
    of: str


@dataclass(frozen=True)
class CaseWork:
    """Holds a case, the steps it is served in, and the number of bytes that a step reads of the weights."""

    case: Case
    steps: list[StepRows]
    weight_bytes: int


@dataclass(frozen=True)
class CaseFigure:
    """Defines one number of a case: `seconds` of a run, in `unit`; where that is tokens per second, `tokens` over the
    seconds.

    `goal` is what the worker alone must reach on a quiet machine of two Zen 5 cores, where `quiet_floor` and
    `quiet_openvino` (OpenVINO GenAI 2026.4) were measured; all three in `unit`.
    """

    case: str
    name: str
    unit: str
    seconds: Callable[[Measurement], float]
    floor: Callable[[CaseWork, Yardsticks], Floor]
    tokens: Callable[[Case], int] | None = None
    goal: float | None = None
    quiet_floor: float | None = None
    quiet_openvino: float | None = None

    def shown(self, seconds: float, case: Case) -> float:
        """Converts `seconds` of a case to the figure's `unit`."""
        if self.tokens:
            return self.tokens(case) / seconds
        return seconds * 1000 if self.unit.startswith("ms") else seconds

    @property
    def goal_over_floor(self) -> float | None:
        """Returns the goal's time over the time of its floor, or None where no floor is known."""
        return self._goal_over(self.quiet_floor)

    @property
    def goal_to_openvino(self) -> float | None:
        """Returns the goal's speed over OpenVINO's, or None where the latter is not known."""
        slowness = self._goal_over(self.quiet_openvino)
        return None if slowness is None else 1 / slowness

    def _goal_over(self, quiet: float | None) -> float | None:
        if self.goal is None or quiet is None:
            return None
        return quiet / self.goal if self.tokens else self.goal / quiet


def _wall(measurement: Measurement) -> float:
    return measurement.wall_s


def _ttft(measurement: Measurement) -> float:
    return measurement.ttft_ms / 1000


def _per_token(measurement: Measurement) -> float:
    assert measurement.ms_per_token is not None, f"case {measurement.case} has no time per token"
    return measurement.ms_per_token / 1000


def _reading(work: CaseWork, yardsticks: Yardsticks) -> Floor:
    of = f"reading {work.weight_bytes / 1e6:.0f} MB of weights at {yardsticks.bytes_per_s / 1e9:.1f} GB/s"
    return Floor(work.weight_bytes / yardsticks.bytes_per_s, of)


def _multiplying(work: CaseWork, yardsticks: Yardsticks) -> Floor:
    return Floor(yardsticks.gemm_s(work.steps), f"torch's matrix products of its {len(work.steps)} steps")


def _multiplying_first(work: CaseWork, yardsticks: Yardsticks) -> Floor:
    first = next(index for index, step in enumerate(work.steps) if step.logit_rows)
    return Floor(yardsticks.gemm_s(work.steps[: first + 1]), "torch's matrix products of the prompt")


def _output(case: Case) -> int:
    return case.num_output_tokens


def _prompt(case: Case) -> int:
    return case.num_prompt_tokens


FIGURES = [
    CaseFigure("a", "time per token", "ms", _per_token, _reading, goal=9.5, quiet_floor=7.3, quiet_openvino=11.2),
    CaseFigure("a", "first token", "ms", _ttft, _multiplying_first, goal=57, quiet_openvino=58.6),
    CaseFigure("b", "output", "tokens/s", _wall, _multiplying, _output, goal=720, quiet_floor=1029, quiet_openvino=586),
    CaseFigure(
        "c", "prompts", "tokens/s", _wall, _multiplying, _prompt, goal=2600, quiet_floor=3431, quiet_openvino=2471
    ),
    CaseFigure("d", "all", "s", _wall, _multiplying, goal=1.8, quiet_openvino=8.2),
    CaseFigure("d-warm", "all", "s", _wall, _multiplying, quiet_openvino=1.72),
    CaseFigure("e", "all", "s", _wall, _multiplying, goal=1.15, quiet_openvino=1.19),
]
