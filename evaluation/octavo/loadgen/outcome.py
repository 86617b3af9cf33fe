"""What a session found, for people and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.loadgen.comparison import Ratio, ratios, ratios_text
from octavo.loadgen.open_loop import Run
from octavo.loadgen.report import Report, make_report, report_text
from octavo.loadgen.session import Side
from octavo.workload.targets import Targets


@dataclass(frozen=True)
class Measured:
    """One server: all rounds together, and each."""

    server: str
    model: str
    report: Report
    rounds: list[Report]


@dataclass(frozen=True)
class Outcome:
    """The servers that there is anything of. `ratios` are of the rounds that both of two have whole. The same
    `prompt_seed` makes the same prompts."""

    prompt_seed: int
    servers: list[Measured]
    ratios: list[Ratio]


def make_outcome(sides: Sequence[Side], targets: Targets | None, prompt_seed: int) -> Outcome:
    """Of all runs so far."""
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
