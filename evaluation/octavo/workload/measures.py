"""Computes the figures of a run from what became of each request."""

from collections.abc import Iterable, Sequence

from octavo.workload.gaps import STATISTICS, Gaps, Spread
from octavo.workload.served import METRICS, Served, Summary
from octavo.workload.targets import Targets, time_text

__all__ = ["Gaps", "Served", "Spread", "Summary", "Targets", "summarise", "to_text"]


def summarise(served: Sequence[Served], gaps: Gaps, seconds: float, targets: Targets | None = None) -> Summary:
    """Sums up a run of `seconds` in which these requests came, with the `gaps` between their tokens. Percentiles are
    exact, but for those of `gaps`."""
    finished = [each for each in served if each.whole]
    good = sum(map(targets.kept_by, finished)) if targets and targets.of_each else None
    output = sum(each.num_tokens for each in served)
    prompts = sum(each.job.prompt_tokens for each in served if each.first_token_s is not None)
    return Summary(
        requests=len(served),
        finished=len(finished),
        failed=sum(bool(each.error) for each in served),
        preemptions=sum(each.preemptions for each in served),
        seconds=seconds,
        requests_per_s=_rate(len(finished), seconds),
        output_tokens_per_s=_rate(output, seconds),
        total_tokens_per_s=_rate(output + prompts, seconds),
        ttft=_spread("ttft", finished),
        itl=gaps.spread(),
        latency=_spread("latency", finished),
        normalised_latency=_spread("normalised_latency", finished),
        good=good,
        goodput_per_s=None if good is None else _rate(good, seconds),
    )


def _rate(count: int, seconds: float) -> float:
    # Where nothing came, no time passed.
    return count / seconds if count else 0.0


def _spread(metric: str, finished: Iterable[Served]) -> Spread | None:
    of = METRICS[metric]
    return Spread.of([value for each in finished if (value := of(each)) is not None])


def to_text(summary: Summary) -> str:
    """Returns the summary as a table for people."""
    lines = [
        f"{summary.finished} of {summary.requests} requests finished in {time_text(summary.seconds)}"
        f" ({summary.failed} failed, {summary.preemptions} preemptions)",
        f"{summary.requests_per_s:.4g} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s,"
        f" {summary.total_tokens_per_s:.4g} tokens/s with prompts",
    ]
    if summary.good is not None:
        lines.append(f"{summary.good} kept the targets: {summary.goodput_per_s:.4g} good requests/s")
    lines.append(f"{'':20}" + "".join(f"{each:>10}" for each in STATISTICS))
    lines += [_row(metric, getattr(summary, metric)) for metric in METRICS]
    return "\n".join(lines)


def _row(metric: str, spread: Spread | None) -> str:
    values = [time_text(getattr(spread, each)) if spread else "-" for each in STATISTICS]
    return f"{metric.replace('_', ' '):20}" + "".join(f"{each:>10}" for each in values)
