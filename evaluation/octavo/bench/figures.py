"""Defines the figures by which each case is judged, with their floors and goals. Goals are ratios, since machines are
seldom quiet; a floor is the least time, as if a step were nothing but its matrix products, or reading the weights."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from octavo.bench.measurement import Measurement
from octavo.bench.workloads import Case

_GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 384)


@dataclass(frozen=True)
class StepRows:
    """Holds a step's tokens, and how many of its rows go through the LM head."""

    tokens: int
    logit_rows: int


@dataclass(frozen=True)
class LinearShapes:
    """Holds the shapes ([out, in]) of a decoder's matrices, of the Llama family: those of each of the `num_layers`, and
    the LM head. Matrices that share an input count as one."""

    num_layers: int
    layer: list[tuple[int, int]]
    head: tuple[int, int]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the shapes of the model in `directory`. Raises `KeyError` if its config.json is not like Llama's."""
        config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        hidden, intermediate, heads = (
            config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        layer = [
            ((heads + 2 * kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * intermediate, hidden),
            (hidden, intermediate),
        ]
        return cls(config["num_hidden_layers"], layer, (config["vocab_size"], hidden))

    @property
    def num_layer_weights(self) -> int:
        return self.num_layers * sum(out * size for out, size in self.layer)

    @property
    def num_head_weights(self) -> int:
        return self.head[0] * self.head[1]

    @property
    def num_weights(self) -> int:
        """Counts the weights that every step reads. The LM head counts in full even where the embedding shares its
        weights; of an embedding of its own a step reads only a few rows."""
        return self.num_layer_weights + self.num_head_weights


@dataclass(frozen=True)
class Yardsticks:
    """Holds the measured rates of the machine: bytes read from memory per second; and seconds of torch's matrix
    products, by number of rows, in all layers and in the LM head."""

    bytes_per_s: float
    layers_s: dict[int, float]
    head_s: dict[int, float]

    def gemm_s(self, steps: Iterable[StepRows]) -> float:
        """Returns the seconds of the matrix products in `steps`."""
        return sum(
            interpolated(self.layers_s, step.tokens)
            + (interpolated(self.head_s, step.logit_rows) if step.logit_rows else 0)
            for step in steps
        )

    @classmethod
    def best(cls, measured: Sequence[Self]) -> Self:
        """Returns the best value of each rate in `measured`."""
        return cls(
            max(yardsticks.bytes_per_s for yardsticks in measured),
            _least([yardsticks.layers_s for yardsticks in measured]),
            _least([yardsticks.head_s for yardsticks in measured]),
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Reads yardsticks from JSON, which has made texts of the numbers of rows."""
        layers_s, head_s = ({int(rows): s for rows, s in value[name].items()} for name in ("layers_s", "head_s"))
        return cls(value["bytes_per_s"], layers_s, head_s)


def _least(tables: list[dict[int, float]]) -> dict[int, float]:
    return {rows: min(table[rows] for table in tables) for rows in tables[0]}


def interpolated(table: dict[int, float], rows: int) -> float:
    """Returns the linear interpolation of `table` between the neighbours of `rows`. Raises `ValueError` beyond the
    ends."""
    known = sorted(table)
    if not known[0] <= rows <= known[-1]:
        raise ValueError(f"{rows} rows lie outside of what was measured, {known[0]} to {known[-1]}")
    upper = known[bisect_left(known, rows)]
    if upper == rows:
        return table[rows]
    lower = known[bisect_left(known, rows) - 1]
    return table[lower] + (table[upper] - table[lower]) * (rows - lower) / (upper - lower)


def grid(rows: Iterable[int]) -> list[int]:
    """Numbers of rows to measure at, so that all of `rows` lie between two."""
    most = max(rows, default=1)
    return [*(known for known in _GRID if known < most), most]


@dataclass(frozen=True)
class Floor:
    """Seconds that a figure would take at least by what the machine gave, and by what of it."""

    seconds: float
    of: str


@dataclass(frozen=True)
class CaseWork:
    """Holds a case, and the steps it is served in."""

    case: Case
    steps: list[StepRows]


@dataclass(frozen=True)
class CaseFigure:
    """Defines one number of a case: `seconds` of a run, in `unit`; where that is tokens per second, `tokens` over the
    seconds.

    `floor` takes the bytes of the weights besides. `goal` is what the worker alone must reach in bf16 on a quiet
    machine of two Zen 5 cores, where `quiet_floor` and `quiet_openvino` (OpenVINO GenAI 2026.4) were measured; all
    three in `unit`.
    """

    case: str
    name: str
    unit: str
    seconds: Callable[[Measurement], float]
    floor: Callable[[CaseWork, int, Yardsticks], Floor]
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


def _reading(_: CaseWork, weight_bytes: int, yardsticks: Yardsticks) -> Floor:
    of = f"reading {weight_bytes / 1e6:.0f} MB of weights at {yardsticks.bytes_per_s / 1e9:.1f} GB/s"
    return Floor(weight_bytes / yardsticks.bytes_per_s, of)


def _multiplying(work: CaseWork, _: int, yardsticks: Yardsticks) -> Floor:
    return Floor(yardsticks.gemm_s(work.steps), f"torch's matrix products of its {len(work.steps)} steps")


def _multiplying_first(work: CaseWork, _: int, yardsticks: Yardsticks) -> Floor:
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
