"""Writes the findings as JSON and as a short table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.bench.gpu.cases import CaseOutcome, CaseResult, GpuCase, Samples, absent
from octavo.bench.gpu.floors import NOMINAL, Ceilings, floor_s
from octavo.bench.table import keep, line

_HEADS = ("", "ours", "floor", "best peer", "figure", "wanted / hoped for", "")
_WIDTHS = (38, 11, 11, 21, 13, 25, 9)
_PLAN_WIDTHS = (38, 9, 11, 27)


@dataclass
class GpuReport:
    """Holds all outcomes. `peers` says of each whether it can be imported. `ceilings` are samples by what they are and
    their unit, for the reader; floors are made of `rates`."""

    settings: dict[str, object]
    peers: dict[str, bool] = field(default_factory=dict)
    ceilings: dict[str, Samples] = field(default_factory=dict)
    rates: Ceilings = NOMINAL
    outcomes: list[CaseOutcome] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {
            "settings": self.settings,
            "peers": self.peers,
            "ceilings": {name: sample.to_json() for name, sample in self.ceilings.items()},
            "rates": self.rates.to_json(),
            "cases": [_case_json(outcome) for outcome in self.outcomes],
        }

    def write(self, path: Path) -> None:
        keep(self.to_json(), path)

    def to_text(self) -> str:
        found = [_row(outcome) for outcome in self.outcomes if outcome.measured]
        rates = [f"{name}: {sample.median:.4g}" for name, sample in self.ceilings.items()]
        return "\n".join([*rates, "", line(_HEADS, _WIDTHS), *found, *_left_out(self.outcomes), *self._absent_peers()])

    def _absent_peers(self) -> Iterator[str]:
        absent_peers = [name for name, there in self.peers.items() if not there]
        if absent_peers:
            yield f"peers that are not here: {', '.join(absent_peers)}"


def plan_text(cases: Sequence[GpuCase], peers: dict[str, bool]) -> str:
    """Describes what would be measured, with floors by nominal rates, and which peers are installed."""
    here = [name for name, there in peers.items() if there]
    not_here = [name for name, there in peers.items() if not there]
    lines = [line(("", "about", "floor", "wanted / hoped for"), _PLAN_WIDTHS)]
    lines += [line(_plan_cells(case), _PLAN_WIDTHS) for case in cases]
    return "\n".join([*lines, "", f"peers here: {', '.join(here)}", f"not here: {', '.join(not_here) or 'none'}"])


def _plan_cells(case: GpuCase) -> tuple[str, ...]:
    missing = absent(case.modules)
    floor = duration(floor_s(case.floor, NOMINAL)) if case.floor else ""
    seconds = case.seconds + (case.held.start_s if case.held else 0.0)
    note = f"  needs {', '.join(missing)}" if missing else ""
    return case.title, f"{seconds:.0f} s", floor, case.target.bounds() + note


def progress(outcome: CaseOutcome) -> str:
    """Formats one line as soon as a case is done."""
    if outcome.measured:
        return _row(outcome)
    return next(_left_out([outcome]))


def duration(seconds: float) -> str:
    """Formats seconds in the unit that makes them a number of one to three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _row(outcome: CaseOutcome) -> str:
    case, measured = outcome.case, outcome.measured
    assert measured is not None
    cells = (
        case.title,
        duration(measured.ours.median) if measured.ours else "",
        duration(outcome.floor_s) if outcome.floor_s else "",
        _best_peer(measured),
        f"{measured.value:.4g} {case.target.unit}",
        case.target.bounds(),
        case.target.verdict(measured.value),
    )
    return line(cells, _WIDTHS)


def _best_peer(measured: CaseResult) -> str:
    if not measured.peers:
        return ""
    name, sample = min(measured.peers.items(), key=lambda peer: peer[1].median)
    return f"{duration(sample.median)} {name}"


def _left_out(outcomes: Iterable[CaseOutcome]) -> Iterator[str]:
    """Yields one line for each case that was not measured, and for each peer that did not run."""
    for outcome in outcomes:
        if outcome.skipped:
            yield f"skipped {outcome.case.title}: {outcome.skipped}"
        elif outcome.failed:
            yield f"FAILED {outcome.case.title}: {outcome.failed.strip().splitlines()[-1]}"
        elif outcome.measured:
            for peer, reason in outcome.measured.missing.items():
                yield f"without {peer} in {outcome.case.title}: {' '.join(reason.split())[:120]}"


def _case_json(outcome: CaseOutcome) -> dict[str, object]:
    case, measured = outcome.case, outcome.measured
    target = case.target
    value: dict[str, object] = {
        "goal": case.goal,
        "part": case.part,
        "what": target.what,
        "unit": target.unit,
        "wanted": target.goal,
        "hoped_for": target.stretch,
        "at_least": target.at_least,
        "floor_s": outcome.floor_s,
        "wall_s": outcome.wall_s,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
    }
    return value if measured is None else {**value, **_measured_json(measured, case, outcome.floor_s)}


def _measured_json(measured: CaseResult, case: GpuCase, floor: float | None) -> dict[str, object]:
    ours = measured.ours
    return {
        "value": measured.value,
        "verdict": case.target.verdict(measured.value),
        "ours_s": ours.to_json() if ours else None,
        "over_floor": ours.median / floor if ours and floor else None,
        "peers_s": {name: sample.to_json() for name, sample in measured.peers.items()},
        "to_peers": {name: sample.median / ours.median for name, sample in measured.peers.items() if ours},
        "missing": measured.missing,
        "notes": measured.notes,
    }
