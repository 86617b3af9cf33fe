"""Faults that a prompt brings about on the fake device, for tests of what must survive them.

A fault is written `KIND=TOKENS[@GENERATED][>SEQUENCES]`, several are joined by commas:

* KIND `die`: the process crashes; `vanish`: it is killed, as if from outside; `hang`: it sleeps for ever with the
  interpreter's lock held, so that none of its threads runs; `raise`: the step raises; `oom`: it raises `MemoryError`;
  `nan`: what the model gives the sequence is not finite.
* TOKENS: ids joined by `+`, a run that the prompt must contain; `*` is in every prompt.
* `@GENERATED`: only once the sequence has that many tokens generated.
* `>SEQUENCES`: only in a step with more sequences than that.

`die=500`, `hang=7+8@3`, `oom=*>4`, `nan=500,raise=501`: a fault strikes in every step with a sequence that it fits.
"""

import ctypes
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from octavo.worker.sequences import WorkerSequence, WorkItem

_FAULT = re.compile(r"(die|vanish|hang|raise|oom|nan)=(\*|\d{1,10}(?:\+\d{1,10})*)(?:@(\d{1,9}))?(?:>(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class FakeFault:
    """A fault in steps of more than `more_than` sequences, to a sequence whose prompt holds the run `tokens` and that
    has `generated` tokens or more."""

    kind: str
    tokens: tuple[int, ...]
    generated: int = 0
    more_than: int = 0

    def victims(self, items: list[WorkItem]) -> list[WorkerSequence]:
        """Returns the sequences of a step that the fault fits."""
        members = [member for item in items for member in item.members]
        return [each for each in members if self._fits(each)] if len(members) > self.more_than else []

    def _fits(self, sequence: WorkerSequence) -> bool:
        prompt, run = sequence.token_ids[: sequence.prompt_length], list(self.tokens)
        starts = range(len(prompt) - len(run) + 1)
        return sequence.num_generated >= self.generated and any(prompt[i : i + len(run)] == run for i in starts)


class FakeFaults:
    """Holds the faults of a fake device."""

    def __init__(self, faults: tuple[FakeFault, ...] = ()) -> None:
        self._faults = faults

    def strike(self, items: list[WorkItem]) -> list[WorkerSequence]:
        """Carries out the faults of this step, and returns the sequences that get NaN. It may not return."""
        spoiled: list[WorkerSequence] = []
        for fault in self._faults:
            victims = fault.victims(items)
            if fault.kind == "nan":
                spoiled += victims
            elif victims:
                _HAPPENINGS[fault.kind]()
        return spoiled


def parse_faults(text: str) -> tuple[FakeFault, ...]:
    """Parses faults as above; no text gives none. Raises `ValueError` on anything else."""
    return tuple(_parse(part) for part in text.split(",")) if text else ()


def _parse(text: str) -> FakeFault:
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no fault; write die, vanish, hang, raise, oom or nan, then =, token ids joined by + (or *),"
            " and if wanted @ with the tokens generated and > with the sequences of a step, like hang=7+8@3>1"
        )
    kind, tokens, generated, more_than = match.groups()
    run = () if tokens == "*" else tuple(map(int, tokens.split("+")))
    return FakeFault(kind, run, int(generated or 0), int(more_than or 0))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("a process outlived SIGSEGV")


def _vanish() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


def _hang() -> NoReturn:
    # Unlike `time.sleep`, and `CDLL`, this keeps the interpreter's lock; a signal ends one sleep at most.
    while True:
        ctypes.PyDLL(None).sleep(3600)


def _raise() -> NoReturn:
    raise RuntimeError("the fake device was told to fail")


def _run_out() -> NoReturn:
    raise MemoryError("the fake device was told to run out of memory")


_HAPPENINGS: dict[str, Callable[[], NoReturn]] = {
    "die": _die,
    "vanish": _vanish,
    "hang": _hang,
    "raise": _raise,
    "oom": _run_out,
}
