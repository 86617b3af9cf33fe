"""Computes the least time of a case, as if a step were nothing but its matrix products, or nothing but reading the
weights once."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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
    def num_weights(self) -> int:
        """Counts the weights that every step reads. The LM head counts in full even where the embedding shares its
        weights; of an embedding of its own a step reads only a few rows."""
        return self.num_layers * sum(out * size for out, size in self.layer) + self.head[0] * self.head[1]


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
