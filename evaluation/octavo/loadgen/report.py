"""Reports one or more runs from their records, for people and as JSON, with two servers compared in ratios."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from octavo.loadgen.events import TimedCommand
from octavo.loadgen.session import LoadRun, Side
from octavo.workload.conversations import TurnSummary, by_turn, turns_text
from octavo.workload.measures import (
    ErrorCount,
    Gaps,
    Spread,
    Summary,
    Targets,
    count_errors,
    summarise,
    time_text,
    to_text,
)

# -- one server -------------------------------------------------------------------------------------------------------


# A generator that sends later than this has measured itself too.
MAX_LAG_S: Final = 0.05


@dataclass(frozen=True)
class LoadReport:
    """Reports one or more runs against one server.

    `lag` is how much later than due requests were sent, in seconds, and `late` says that the load generator could not
    keep up. `short` requests ended well, but with fewer tokens than asked; `unsent` and `unfinished` ones are those
    that an interrupt kept from being sent, or answered. `tokens_per_delivery` is 1 where every token came alone;
    `cached_share` is the part of the prompts' tokens that the server said it had computed before. `turns` are those of
    conversations. Of prompts so many tokens were `found` by tier, if the scheduler was asked; `commands` were run.
    """

    summary: Summary
    lag: Spread | None
    late: bool
    errors: list[ErrorCount]
    short: int
    unsent: int
    unfinished: int
    tokens_per_delivery: float
    cached_share: float
    unmet: list[str]
    turns: list[TurnSummary] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    commands: list[TimedCommand] = field(default_factory=list)

    @property
    def all_failed(self) -> bool:
        """Returns whether nothing that was sent came to a good end, though it had the time."""
        return self.summary.failed > 0 and self.summary.finished == 0


def make_report(runs: Sequence[LoadRun], targets: Targets | None = None) -> LoadReport:
    """Makes one report of all requests of the runs; their times are added up."""
    records = [record for run in runs for record in run.records]
    sent = [record for record in records if record.sent_s is not None]
    gaps = Gaps()
    for run in runs:
        gaps.merge(run.gaps)
    summary = summarise([record.served() for record in sent], gaps, sum(run.seconds for run in runs), targets)
    lag = Spread.of([record.lag_s for record in sent if record.lag_s is not None])
    return LoadReport(
        summary=summary,
        lag=lag,
        late=lag is not None and lag.p99 > MAX_LAG_S,
        errors=count_errors((record.failure.kind, record.failure.detail) for record in sent if record.failure),
        short=sum(record.is_short for record in sent),
        unsent=len(records) - len(sent),
        unfinished=sum(record.finished_s is None and record.failure is None for record in sent),
        tokens_per_delivery=_share(
            sum(record.num_tokens for record in sent), sum(record.deliveries for record in sent)
        ),
        cached_share=_share(sum(record.cached_tokens for record in sent), sum(record.prompt_tokens for record in sent)),
        unmet=targets.unmet(summary) if targets else [],
        turns=by_turn(record.served() for record in sent),
        found=_added_up(run.found for run in runs),
        commands=[command for run in runs for command in run.commands],
    )


def _added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def report_text(report: LoadReport) -> str:
    """Returns the report as text for people."""
    return "\n".join([to_text(report.summary).rstrip(), *turns_text(report.turns), *_remarks(report)])


def _remarks(report: LoadReport) -> Iterator[str]:
    for error in report.errors:
        yield f"failed {error.count}: {error.kind}" + (f" ({error.example})" if error.example else "")
    if report.unsent or report.unfinished:
        yield f"interrupted: {report.unsent} requests not sent, {report.unfinished} still under way"
    if report.short:
        yield f"{report.short} answers were shorter than asked: the server ended them; their real lengths are counted"
    if report.tokens_per_delivery > 1.05:
        yield f"{report.tokens_per_delivery:.2f} tokens came at a time; itl is between one such delivery and the next"
    if report.cached_share:
        yield f"{report.cached_share:.1%} of the prompts' tokens were in the server's prefix cache"
    if report.found:
        yield "found, by tier: " + ", ".join(f"{count} tokens {tier}" for tier, count in report.found.items())
    for command in report.commands:
        ended = "was not over" if command.status is None else f"ended with status {command.status}"
        yield f"at {time_text(command.at_s)} was run, and {ended}: {command.command}"
    if report.lag:
        yield f"sent late by {time_text(report.lag.p50)} (p50), {time_text(report.lag.p99)} (p99), at most" + (
            f" {time_text(report.lag.max)}"
        )
    if report.late:
        yield (
            "the load generator could not keep up: its own lag is in these figures; give it a core of its own, or"
            " lower the rate"
        )
    yield from (f"target missed: {fault}" for fault in report.unmet)


# -- two servers compared ---------------------------------------------------------------------------------------------


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


def ratios(first: Sequence[LoadReport], second: Sequence[LoadReport]) -> list[Ratio]:
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
class ServerReport:
    """Reports one server: all rounds together, and each."""

    server: str
    model: str
    report: LoadReport
    rounds: list[LoadReport]


@dataclass(frozen=True)
class SessionOutcome:
    """Reports the servers of which there is any result. `ratios` are of the rounds that both of two have whole. The
    same `prompt_seed` makes the same prompts."""

    prompt_seed: int
    servers: list[ServerReport]
    ratios: list[Ratio]


def make_outcome(sides: Sequence[Side], targets: Targets | None, prompt_seed: int) -> SessionOutcome:
    """Sums up all runs so far."""
    whole = [[make_report([run], targets) for run in side.runs if not run.interrupted] for side in sides]
    rounds = min(map(len, whole))
    return SessionOutcome(
        prompt_seed=prompt_seed,
        servers=[_measured(side, targets) for side in sides if side.runs],
        ratios=ratios(whole[0][:rounds], whole[1][:rounds]) if len(sides) == 2 else [],
    )


def _measured(side: Side, targets: Targets | None) -> ServerReport:
    def report(runs: Sequence[LoadRun]) -> LoadReport:
        return make_report(runs, targets)

    return ServerReport(str(side.target), side.model, report(side.runs), [report([run]) for run in side.runs])


def outcome_text(outcome: SessionOutcome) -> str:
    """Blocks with an empty line between them."""
    return "\n\n".join(_blocks(outcome))


def _blocks(outcome: SessionOutcome) -> Iterator[str]:
    for name, measured in zip("AB", outcome.servers, strict=False):
        head = f"{name}: " if len(outcome.servers) > 1 else ""
        yield f"{head}{measured.server}, model {measured.model or 'without a name'}\n{report_text(measured.report)}"
    if outcome.ratios:
        yield ratios_text(outcome.ratios)
