"""Writes docs/models.md from what the sweep over architectures found.

`python -m octavo.testing.small.architecture_table`: writes it; `--check`: says whether it is current.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from octavo.testing.small.architecture_trial import TOLERANCE, Trial
from octavo.worker.models.architectures import ARCHITECTURES

DOCS = Path(__file__).parents[5] / "docs"
_INTRODUCTION = """\
# Models

<!-- Written by `python -m octavo.testing.small.architecture_table` from models.json; do not edit. -->

Every architecture that transformers {version} calls a causal language model, tried on a tiny random model in fp32:
prompts of several lengths in one batch, cut into chunks, then continued token by token. {works} work, {refused} are
refused at start with the reason, {untried} could not be tried.

*Native*: Octavo computes it itself, faster, wherever it has all that config.json asks for, and through transformers
otherwise. *Error*: the largest difference of a logit from transformers' own, on the way through transformers, relative
to the largest logit; at most {tolerance} is asked for.
"""
RESULTS, PAGE = DOCS / "models.json", DOCS / "models.md"
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class Results(msgspec.Struct):
    """Holds what a sweep wrote: the version of transformers it ran with, and the end of each architecture."""

    transformers: str
    trials: list[Trial]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    check = parser.parse_args().check
    text = render(read_results())
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        sys.exit(f"{PAGE} is not what {RESULTS.name} gives; run python -m {__spec__.name}")


def read_results() -> Results:
    """Reads the committed results."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


def render(results: Results) -> str:
    """Renders the page in Markdown."""
    by_status: dict[str, list[Trial]] = defaultdict(list)
    for trial in results.trials:
        by_status[trial.status].append(trial)
    introduction = _INTRODUCTION.format(
        version=results.transformers,
        tolerance=f"{TOLERANCE:g}",
        **{status: len(by_status[status]) for status in ("works", "refused", "untried")},
    )
    return "\n".join(
        [
            introduction,
            *_summary(by_status["works"]),
            *_works(by_status["works"]),
            *_reasons("Refused at start", by_status["refused"]),
            *_reasons("Not tried: no tiny model could be made", by_status["untried"]),
            *_reasons("Wrong", by_status["wrong"]),
        ]
    )


def _summary(works: list[Trial]) -> list[str]:
    """The table of who computes the architectures that work, in short names."""
    native = {trial.architecture for trial in works} & set(ARCHITECTURES)
    others = {trial.architecture for trial in works} - native
    rows = [
        f"| Octavo's own layers | {_short(native)} |",
        f"| transformers' layers, Octavo's attention and linear layers | {_short(others)} |",
    ]
    return ["| Computed by | Architectures |", "|---|---|", *rows, ""]


def _short(architectures: set[str]) -> str:
    names = set()
    for name in architectures:
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        names.add(name)
    return ", ".join(sorted(names, key=str.lower))


def _works(trials: list[Trial]) -> list[str]:
    rows = [
        f"| {trial.architecture} | `{trial.model_type}` | {'yes' if trial.architecture in ARCHITECTURES else ''} |"
        f" {trial.error:.0e} |"
        for trial in sorted(trials, key=_by_name)
    ]
    return ["## Work", "", "| Architecture | model_type | Native | Error |", "|---|---|---|---|", *rows, ""]


def _reasons(title: str, trials: list[Trial]) -> list[str]:
    """Architectures by what is the matter with them; nothing if there are none."""
    by_reason: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_reason[(trial.reason or "").removeprefix(f"{trial.architecture} ")].append(trial)
    rows = [f"| {_cell(reason)} | {_names(some)} |" for reason, some in sorted(by_reason.items())]
    return [f"## {title}", "", "| Reason | Architectures |", "|---|---|", *rows, ""] if rows else []


def _names(trials: Iterable[Trial]) -> str:
    return ", ".join(f"{trial.architecture} (`{trial.model_type}`)" for trial in sorted(trials, key=_by_name))


def _by_name(trial: Trial) -> tuple[str, str]:
    return trial.architecture.lower(), trial.model_type


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
