"""Makes the report of one or more runs from their records."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.loadgen.open_loop import Run
from octavo.loadgen.records import Record
from octavo.workload.gaps import Gaps, Spread
from octavo.workload.measures import summarise, to_text
from octavo.workload.served import Summary
from octavo.workload.targets import Targets, time_text

# A generator that sends later than this has measured itself too.
MAX_LAG_S: Final = 0.05


@dataclass(frozen=True)
class ErrorCount:
    """Requests that failed in one way, with the message that the first of them got."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class Report:
    """Reports one or more runs against one server.

    `lag` is how much later than due requests were sent, in seconds, and `late` says that the load generator could not
    keep up. `short` requests ended well, but with fewer tokens than asked; `unsent` and `unfinished` ones are those
    that an interrupt kept from being sent, or answered. `tokens_per_delivery` is 1 where every token came alone;
    `cached_share` is the part of the prompts' tokens that the server said it had computed before.
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

    @property
    def all_failed(self) -> bool:
        """Returns whether nothing that was sent came to a good end, though it had the time."""
        return self.summary.failed > 0 and self.summary.finished == 0


def make_report(runs: Sequence[Run], targets: Targets | None = None) -> Report:
    """Makes one report of all requests of the runs; their times are added up."""
    records = [record for run in runs for record in run.records]
    sent = [record for record in records if record.sent_s is not None]
    gaps = Gaps()
    for run in runs:
        gaps.merge(run.gaps)
    summary = summarise([record.served() for record in sent], gaps, sum(run.seconds for run in runs), targets)
    lag = Spread.of([record.lag_s for record in sent if record.lag_s is not None])
    return Report(
        summary=summary,
        lag=lag,
        late=lag is not None and lag.p99 > MAX_LAG_S,
        errors=_errors(sent),
        short=sum(record.is_short for record in sent),
        unsent=len(records) - len(sent),
        unfinished=sum(record.finished_s is None and record.failure is None for record in sent),
        tokens_per_delivery=_share(
            sum(record.num_tokens for record in sent), sum(record.deliveries for record in sent)
        ),
        cached_share=_share(sum(record.cached_tokens for record in sent), sum(record.prompt_tokens for record in sent)),
        unmet=targets.unmet(summary) if targets else [],
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _errors(records: Sequence[Record]) -> list[ErrorCount]:
    failures = [record.failure for record in records if record.failure]
    first = {failure.kind: failure.detail for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return [ErrorCount(kind, count, first[kind]) for kind, count in counts.most_common()]


def report_text(report: Report) -> str:
    """Returns the report as text for people."""
    return "\n".join([to_text(report.summary).rstrip(), *_remarks(report)])


def _remarks(report: Report) -> Iterator[str]:
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
