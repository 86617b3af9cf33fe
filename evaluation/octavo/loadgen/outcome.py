"""Writes the outcome of a session for people and as JSON, with two servers compared in ratios."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from octavo.loadgen.open_loop import Run
from octavo.loadgen.report import Report, make_report, report_text
from octavo.loadgen.session import Side
from octavo.workload.served import Summary
from octavo.workload.targets import Targets

# Rates, and statistics of spreads.
_RATES: Final = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")
_SPREADS: Final = ("ttft", "itl", "latency", "normalised_latency")
_STATISTICS: Final = ("mean", "p50", "p99")


@dataclass(frozen=True)
class Ratio:
    """Divides the second server's value by the first's, round by round: the median, the lowest and the highest
    ratio."""

    metric: str
    median: float
    low: float
    high: float


def ratios(first: Sequence[Report], second: Sequence[Report]) -> list[Ratio]:
    """Returns one ratio for every metric that both servers have in every round; the reports are in order of their
    rounds."""
    pairs = [(_values(a.summary), _values(b.summary)) for a, b in zip(first, second, strict=True)]
    if not pairs:
        return []
    shared = [name for name in pairs[0][0] if all(a.get(name) and name in b for a, b in pairs)]
    return [_ratio(name, [b[name] / a[name] for a, b in pairs]) for name in shared]


def _ratio(name: str, values: Sequence[float]) -> Ratio:
    return Ratio(name, median(values), min(values), max(values))


def _values(summary: Summary) -> dict[str, float]:
    rates = {name: value for name in _RATES if (value := getattr(summary, name)) is not None}
    spreads = {
        f"{name}_{statistic}": getattr(spread, statistic)
        for name in _SPREADS
        if (spread := getattr(summary, name)) is not None
        for statistic in _STATISTICS
    }
    return rates | spreads


def ratios_text(found: Sequence[Ratio]) -> str:
    """Returns the ratios as a table for people."""
    width = max((len(ratio.metric) for ratio in found), default=6)
    lines = [f"{'B / A':<{width}}  median     low    high"]
    lines += [f"{r.metric:<{width}}  {r.median:6.3f}  {r.low:6.3f}  {r.high:6.3f}" for r in found]
    return "\n".join(lines)


@dataclass(frozen=True)
class Measured:
    """Reports one server: all rounds together, and each."""

    server: str
    model: str
    report: Report
    rounds: list[Report]


@dataclass(frozen=True)
class Outcome:
    """Reports the servers of which there is any result. `ratios` are of the rounds that both of two have whole. The
    same `prompt_seed` makes the same prompts."""

    prompt_seed: int
    servers: list[Measured]
    ratios: list[Ratio]


def make_outcome(sides: Sequence[Side], targets: Targets | None, prompt_seed: int) -> Outcome:
    """Sums up all runs so far."""
    whole = [[make_report([run], targets) for run in side.runs if not run.interrupted] for side in sides]
    rounds = min(map(len, whole))
    return Outcome(
        prompt_seed=prompt_seed,
        servers=[_measured(side, targets) for side in sides if side.runs],
        ratios=ratios(whole[0][:rounds], whole[1][:rounds]) if len(sides) == 2 else [],
    )


def _measured(side: Side, targets: Targets | None) -> Measured:
    def report(runs: Sequence[Run]) -> Report:
        return make_report(runs, targets)

    return Measured(str(side.target), side.model, report(side.runs), [report([run]) for run in side.runs])


def outcome_text(outcome: Outcome) -> str:
    """Blocks with an empty line between them."""
    return "\n\n".join(_blocks(outcome))


def _blocks(outcome: Outcome) -> Iterator[str]:
    for name, measured in zip("AB", outcome.servers, strict=False):
        head = f"{name}: " if len(outcome.servers) > 1 else ""
        yield f"{head}{measured.server}, model {measured.model or 'without a name'}\n{report_text(measured.report)}"
    if outcome.ratios:
        yield ratios_text(outcome.ratios)
