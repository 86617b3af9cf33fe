"""Reports a simulation as one document for programs and one page for people."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from octavo.simulator.engine import Outcome
from octavo.simulator.timeline import Sample
from octavo.workload.measures import summarise, to_text
from octavo.workload.served import Served, Summary
from octavo.workload.targets import Targets, time_text

_WIDTH: Final = 60
_BARS: Final = " ▁▂▃▄▅▆▇█"
# What is drawn over time.
_CURVES: Final[dict[str, Callable[[Sample], float]]] = {
    "waiting requests": lambda sample: sample.waiting,
    "running requests": lambda sample: sample.running,
    "swapped requests": lambda sample: sample.swapped,
    "blocks in use, %": lambda sample: 100 * sample.blocks_used / sample.blocks,
}


@dataclass(frozen=True)
class ErrorCount:
    """Requests that were refused alike, with the message that the first of them got."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class Report:
    """Reports a simulated run. `preemptions` are those that the schedulers made, of which `swaps` kept the KV in CPU
    memory; `unmet` is what of the targets was not kept."""

    summary: Summary
    errors: list[ErrorCount]
    steps: int
    busy_share: float
    preemptions: int
    swaps: int
    samples: list[Sample]
    unmet: list[str]


def make_report(outcome: Outcome, targets: Targets | None = None) -> Report:
    """Makes a report that depends on nothing but the simulation: the same seed, the same report."""
    summary = summarise(outcome.served, outcome.gaps, outcome.seconds, targets)
    return Report(
        summary=summary,
        errors=_errors(outcome.served),
        steps=outcome.steps,
        busy_share=outcome.busy_share,
        preemptions=outcome.preemptions,
        swaps=outcome.swaps,
        samples=outcome.samples,
        unmet=targets.unmet(summary) if targets else [],
    )


def _errors(served: Sequence[Served]) -> list[ErrorCount]:
    split = [each.error.partition(": ") for each in served if each.error]
    first = {kind: detail for kind, _, detail in reversed(split)}
    return [ErrorCount(kind, count, first[kind]) for kind, count in Counter(kind for kind, _, _ in split).most_common()]


def report_text(report: Report) -> str:
    """Returns the report as text for people."""
    lines = [to_text(report.summary)]
    lines += [f"refused {error.count}: {error.kind} ({error.example})" for error in report.errors]
    lines.append(
        f"{report.steps} steps, replicas busy {report.busy_share:.1%} of the time; {report.preemptions} preemptions,"
        f" {report.swaps} of them swaps"
    )
    if report.samples:
        lines += ["", *_drawn(report.samples)]
    lines += [f"target missed: {fault}" for fault in report.unmet]
    return "\n".join(lines)


def _drawn(samples: Sequence[Sample]) -> list[str]:
    """Returns a curve for each quantity, from 0 to its maximum."""
    lines = [f"{'over time':18}{'mean':>8}{'max':>8}  from 0 s to {time_text(samples[-1].time)}"]
    for name, quantity in _CURVES.items():
        values = [quantity(sample) for sample in samples]
        lines.append(f"{name:18}{sum(values) / len(values):8.1f}{max(values):8.0f}  {sparkline(values, _WIDTH)}")
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws at most `width` characters, each as high as the largest of the values that it stands for; only 0 is
    blank."""
    count = min(width, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)]
    peaks = [max(values[first:last]) for first, last in pairwise(bounds)]
    top = max(peaks)
    return "".join(_BARS[-int(-peak / top * (len(_BARS) - 1) // 1)] if top else _BARS[0] for peak in peaks)
