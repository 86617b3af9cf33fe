"""Reports a simulation as one document for programs and one page for people, and finds how many replicas a load needs:
the smallest number with which the targets are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from octavo.simulator.cell import Copied, Sample
from octavo.simulator.engine import SimulationOutcome
from octavo.workload.conversations import TurnSummary, by_turn, found_text, turns_text
from octavo.workload.job import Job
from octavo.workload.measures import ErrorCount, Summary, Targets, count_errors, summarise, time_text, to_text

# -- one simulation ---------------------------------------------------------------------------------------------------


_WIDTH: Final = 60
_SHOWN_DEPTHS: Final = 8
_BARS: Final = " ▁▂▃▄▅▆▇█"
# What is drawn over time.
_CURVES: Final[dict[str, Callable[[Sample], float]]] = {
    "waiting requests": lambda sample: sample.waiting,
    "running requests": lambda sample: sample.running,
    "swapped requests": lambda sample: sample.swapped,
    "blocks in use, %": lambda sample: 100 * sample.blocks_used / max(sample.blocks, 1),
}


@dataclass(frozen=True)
class Plain:
    """Sums up the same load without speculation."""

    summary: Summary
    steps: int
    busy_share: float


@dataclass(frozen=True)
class SpeculationReport:
    """Reports what speculation did: the guesses that were drafted and those accepted; the share of the sequences' steps
    that had any, the tokens that one with them gave, and those of any; the share of the first, second, ... guesses that
    were right, of those checked; and the run without it (None: it was not simulated)."""

    drafted: int
    accepted: int
    share_of_steps: float
    tokens_per_drafted_step: float
    tokens_per_step: float
    right_by_depth: list[float]
    plain: Plain | None


@dataclass(frozen=True)
class SimulationReport:
    """Reports a simulated run. `preemptions` are those that the schedulers made, of which `swaps` kept the KV in CPU
    memory; `unmet` is what of the targets was not kept; `speculation` is None where nothing was guessed. Of the
    prompts' tokens, of what was computed or found, those `found` are counted by tier; `turns` are those of
    conversations. `copied` is what replicas have copied of each other."""

    summary: Summary
    errors: list[ErrorCount]
    steps: int
    busy_share: float
    preemptions: int
    swaps: int
    samples: list[Sample]
    unmet: list[str]
    speculation: SpeculationReport | None = None
    prompt_tokens: int = 0
    found: dict[str, int] = field(default_factory=dict)
    turns: list[TurnSummary] = field(default_factory=list)
    copied: Copied = field(default_factory=Copied)


def make_report(
    outcome: SimulationOutcome, targets: Targets | None = None, plain: SimulationOutcome | None = None
) -> SimulationReport:
    """Makes a report that depends on nothing but the simulation: the same seed, the same report. `plain` is the outcome
    of the same load without speculation."""
    summary = summarise(outcome.served, outcome.gaps, outcome.seconds, targets)
    return SimulationReport(
        summary=summary,
        errors=count_errors(each.error.partition(": ")[::2] for each in outcome.served if each.error),
        steps=outcome.steps,
        busy_share=outcome.busy_share,
        preemptions=outcome.preemptions,
        swaps=outcome.swaps,
        samples=outcome.samples,
        unmet=targets.unmet(summary) if targets else [],
        speculation=_speculation(outcome, plain) if outcome.guesses.steps else None,
        prompt_tokens=sum(each.job.prompt_tokens for each in outcome.served if each.first_token_s is not None),
        found=outcome.found,
        turns=by_turn(outcome.served),
        copied=outcome.copied,
    )


def _speculation(outcome: SimulationOutcome, plain: SimulationOutcome | None) -> SpeculationReport:
    guesses = outcome.guesses
    return SpeculationReport(
        drafted=guesses.drafted,
        accepted=guesses.accepted,
        share_of_steps=guesses.steps / outcome.turns,
        tokens_per_drafted_step=guesses.tokens_per_step,
        tokens_per_step=1 + guesses.accepted / outcome.turns,
        right_by_depth=guesses.right_by_depth,
        plain=_plain(plain) if plain is not None else None,
    )


def _plain(outcome: SimulationOutcome) -> Plain:
    return Plain(summarise(outcome.served, outcome.gaps, outcome.seconds), outcome.steps, outcome.busy_share)


def report_text(report: SimulationReport) -> str:
    """Returns the report as text for people."""
    lines = [to_text(report.summary)]
    lines += [f"refused {error.count}: {error.kind} ({error.example})" for error in report.errors]
    lines.append(
        f"{report.steps} steps, replicas busy {report.busy_share:.1%} of the time; {report.preemptions} preemptions,"
        f" {report.swaps} of them swaps"
    )
    if report.found:
        lines.append(found_text(report.prompt_tokens, report.found))
    if report.copied != Copied():
        lines.append(_copied(report.copied))
    lines += turns_text(report.turns)
    if report.speculation is not None:
        lines += _speculated(report, report.speculation)
    if report.samples:
        lines += ["", *_drawn(report.samples)]
    lines += [f"target missed: {fault}" for fault in report.unmet]
    return "\n".join(lines)


def _copied(copied: Copied) -> str:
    failed = f"; {copied.failed} copies came to nothing" if copied.failed else ""
    return (
        f"{copied.requests} requests moved between replicas with {copied.blocks} blocks, and {copied.prefix_blocks}"
        f" blocks of prefixes were copied: {copied.nbytes / 1e9:.4g} GB{failed}"
    )


def _speculated(report: SimulationReport, found: SpeculationReport) -> list[str]:
    by_depth = " ".join(f"{share:.2f}" for share in found.right_by_depth[:_SHOWN_DEPTHS])
    lines = [
        f"speculation: {found.accepted} of {found.drafted} guesses were right, by depth {by_depth};"
        f" {found.share_of_steps:.0%} of the sequences' steps had some, and gave {found.tokens_per_drafted_step:.2f}"
        f" tokens; any gave {found.tokens_per_step:.2f}"
    ]
    if found.plain is not None:
        lines.append(f"{'':20}{'steps':>10}{'tokens/s':>10}{'busy':>10}{'latency':>10}{'itl':>10}")
        lines.append(_run_line("with speculation", report.steps, report.summary, report.busy_share))
        lines.append(_run_line("without", found.plain.steps, found.plain.summary, found.plain.busy_share))
    return lines


def _run_line(label: str, steps: int, summary: Summary, busy_share: float) -> str:
    means = [time_text(spread.mean) if spread else "-" for spread in (summary.latency, summary.itl)]
    return f"{label:20}{steps:10}{summary.output_tokens_per_s:10.4g}{busy_share:10.1%}" + "".join(
        f"{each:>10}" for each in means
    )


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


# -- a plan -----------------------------------------------------------------------------------------------------------


# Simulates the jobs on so many replicas.
SimulateOn = Callable[[Sequence[Job], int], SimulationReport]
_NUM_ALONE: Final = 100
# Longer than any request takes.
_APART_S: Final = 1e5


def replicas_text(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


@dataclass(frozen=True)
class Tried:
    """Holds the targets that a number of replicas did not keep (none: they suffice), and the run's figures."""

    replicas: int
    unmet: list[str]
    summary: Summary
    busy_share: float

    def __str__(self) -> str:
        return f"{replicas_text(self.replicas)}: {'; '.join(self.unmet) or 'all targets kept'}"


@dataclass(frozen=True)
class Plan:
    """Holds the smallest number of replicas that suffices, as does the next larger one (None: none up to the limit),
    with all that was tried; and what even a replica that is always idle when a request comes does not keep."""

    replicas: int | None
    tried: list[Tried]
    unmet_alone: list[str]


def make_plan(
    run: SimulateOn, jobs: Sequence[Job], least: int, most: int, report: Callable[[Tried], None] = lambda _: None
) -> Plan:
    """Searches for the smallest number of replicas, from `least` to `most`, that keeps the targets.

    More replicas are not always better, as where a prefix is cached depends on chance: so a number counts only if one
    more suffices too, and one below the answer does not suffice. `report` gets each number that was tried.
    """
    search = _Search(run, jobs, most, report)
    unmet_alone = run(alone(jobs), 1).unmet
    # The sample may be harder than the whole: what is certain is what the most replicas do.
    if unmet_alone and not search.suffices(most):
        return Plan(None, search.tried, unmet_alone)
    found = search.smallest(least)
    return Plan(found, search.tried, unmet_alone if found is None else [])


def alone(jobs: Sequence[Job]) -> list[Job]:
    """Returns some of the jobs, spread over all of them, each long after the one before."""
    step = max(1, len(jobs) // _NUM_ALONE)
    return [replace(job, arrival_s=place * _APART_S) for place, job in enumerate(jobs[::step])]


class _Search:
    def __init__(self, run: SimulateOn, jobs: Sequence[Job], most: int, report: Callable[[Tried], None]) -> None:
        self._run = run
        self._report = report
        self._jobs = jobs
        self._most = most
        self._found: dict[int, Tried] = {}

    @property
    def tried(self) -> list[Tried]:
        """Returns all runs by number of replicas."""
        return [self._found[replicas] for replicas in sorted(self._found)]

    def suffices(self, replicas: int) -> bool:
        if replicas not in self._found:
            report = self._run(self._jobs, replicas)
            self._found[replicas] = Tried(replicas, report.unmet, report.summary, report.busy_share)
            self._report(self._found[replicas])
        return not self._found[replicas].unmet

    def smallest(self, least: int) -> int | None:
        """Searches by doubling, then by halving what is left; then upwards until a number and the next both suffice."""
        below, above = least - 1, least
        while not self.suffices(above):
            if above == self._most:
                return None
            below, above = above, min(2 * above, self._most)
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if self.suffices(middle) else (middle, above)
        while above < self._most and not self.suffices(above + 1):
            above += 1
            while not self.suffices(above):
                if above == self._most:
                    return None
                above += 1
        return above


def plan_text(plan: Plan, targets: Targets, least: int, most: int) -> str:
    """Returns the plan as text for people."""
    lines = [str(each) for each in plan.tried]
    wanted = ", ".join(map(str, (*targets.of_all, *targets.of_each)))
    if plan.replicas is not None:
        [found] = (each for each in plan.tried if each.replicas == plan.replicas)
        return "\n".join(
            [
                *lines,
                "",
                f"{wanted}: {replicas_text(plan.replicas)}",
                "",
                to_text(found.summary),
                f"replicas busy {found.busy_share:.1%} of the time",
            ]
        )
    answer = f"no number of replicas from {least} to {most} keeps {wanted}"
    if plan.unmet_alone:
        answer += f", because even on an idle replica {'; '.join(plan.unmet_alone)}"
    return "\n".join([*lines, "", answer])
