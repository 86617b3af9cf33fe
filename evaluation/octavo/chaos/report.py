"""Reports the outcome of a campaign."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from octavo.testbed.stack import Stack

# What a fake device says of a fault that a prompt brings about: it is meant to be.
_MEANT: Final = "the fake device was told to"
# An exception in a log, by its last line.
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(.*)$", re.MULTILINE)
_MAX_FAULTS: Final = 20


@dataclass(frozen=True)
class CampaignReport:
    """Holds a campaign's results: `figures` are the campaign's own; `whole`: streams that got all of their answer;
    `faults`: what may not be."""

    campaign: str
    count: int
    seconds: float
    whole: int
    kinds: dict[str, int]
    figures: dict[str, float]
    faults: list[str]

    def line(self) -> str:
        """Returns the report as JSON in one line."""
        return json.dumps(asdict(self))

    def keep(self, file: Path) -> None:
        """Puts the report into a file of JSON, in place of an older one of the same campaign."""
        kept = json.loads(file.read_text()) if file.exists() else {}
        content = {**asdict(self), "date": time.strftime("%Y-%m-%d", time.gmtime())}
        file.write_text(json.dumps({**kept, self.campaign: content}, indent=2, sort_keys=True) + "\n")


def in_logs(stack: Stack) -> list[str]:
    """Exceptions that processes have logged, but for those that were asked for."""
    found = ((name, trace[1]) for name in stack.processes for trace in _TRACEBACK.finditer(stack.log(name)))
    return [f"in the log of {name}: {error}" for name, error in found if _MEANT not in error]


def shortened(faults: Iterable[object]) -> list[str]:
    """Returns the first faults, and how many more there are."""
    texts = [str(fault)[:500] for fault in faults]
    more = len(texts) - _MAX_FAULTS
    return [*texts[:_MAX_FAULTS], f"and {more} more"] if more > 0 else texts
