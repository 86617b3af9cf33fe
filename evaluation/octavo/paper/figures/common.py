"""Holds what several figures need."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from octavo.paper.digits import DIGITS
from octavo.paper.figure import How, Kind, Panel, Row, Series
from octavo.paper.lab import LIMIT_S, Knee
from octavo.paper.systems import FASTER_TRANSFORMER, VLLM
from octavo.paper.trial import Trial

ORCAS: Final = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
ORACLE: Final = "Orca (Oracle)"
MAX: Final = "Orca (Max)"
ALL: Final = (FASTER_TRANSFORMER, *ORCAS, VLLM)
# Times the assumed spread.
SIGMAS: Final = (0.7, 1.0, 1.3)

SHAREGPT: Final = "sharegpt"
ALPACA: Final = "alpaca"
TITLES: Final = {SHAREGPT: "ShareGPT", ALPACA: "Alpaca", "chatbot": "chatbot", "wmt16": "WMT16"}
MODELS: Final = {
    "opt-13b": "OPT-13B on one A100-40GB",
    "opt-66b": "OPT-66B on four A100-40GB",
    "opt-175b": "OPT-175B on eight A100-80GB",
    "llama-13b": "LLaMA-13B on one A100-40GB",
}
# About what each system sustains of what vLLM does: where to begin to look.
_SHARES: Final = {FASTER_TRANSFORMER: 0.06, "Orca (Max)": 0.25, "Orca (Pow2)": 0.45, ORACLE: 0.6, VLLM: 1.0}

# Rates that are sustained, by system.
Rates = Mapping[str, float]


def guess(system: str, vllm: float) -> float:
    """Returns a rate to begin with, where vLLM sustains about so much."""
    return _SHARES[system] * vllm


def rates_of(trials: Sequence[Trial], knees: Sequence[Knee]) -> dict[str, float]:
    """Returns the rates of one panel by system, each system once."""
    return {trial.system: knee.rate for trial, knee in zip(trials, knees, strict=True)}


def curves(title: str, trials: Sequence[Trial], knees: Sequence[Knee]) -> Panel:
    """Draws latency by rate."""
    return Panel(
        title=title,
        x_label="requests per second",
        y_label="normalised latency, s/token",
        y_max=2 * LIMIT_S,
        series=[Series(trial.system, knee.latencies, knee.rates) for trial, knee in zip(trials, knees, strict=True)],
    )


def bars(title: str, y_label: str, ours: Mapping[str, float], digits: Sequence[str]) -> Panel:
    """Draws one bar for each name in `ours`, beside the paper's digits."""
    papers = [DIGITS[digit].low if digit in DIGITS else None for digit in digits]
    return Panel(
        title=title,
        x_label="",
        y_label=y_label,
        kind=Kind.BARS,
        categories=list(ours),
        series=[
            Series("paper", papers, paper=True),
            Series("ours", list(ours.values())),
        ],
    )


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def span(ratios: Iterable[float], unit: str = "×") -> str:
    """Returns the ratios as text, from the least to the most."""
    ratios = sorted(ratios)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}{unit}"


def simulated(digit: str, value: float, text: str, on: str, why: str) -> Row:
    return Row(digit=digit, value=value, text=text, how=How.SIMULATED, on=on, why=why)
