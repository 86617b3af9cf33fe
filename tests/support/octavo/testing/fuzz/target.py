"""What is attacked: processes that serve good requests all the while, and what may not happen to them."""

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from octavo.testing.stack import Stack, token_request

# How an attack sends so many messages; counts what came of them, by words.
Attack = Callable[[Stack, Random, int], Counter[str]]

MAX_GROWTH_MIB: Final = 10.0
_LEGAL_TOKENS: Final = 8
_QUIET_S: Final = 2.0
# What stands in a log where something was not foreseen.
_FAULTS: Final = ("Traceback (most recent call last)", '"exc_info"', "Task exception was never retrieved")
# The share of an attack that fills caches and pools before memory is measured.
_WARM_UP: Final = 20


@dataclass
class Report:
    """What came of an attack. `faults` are what may not be."""

    messages: int
    seconds: float
    answers: Counter[str]
    growth_mib: dict[str, float]
    quiet_s: list[float]
    attacked_s: list[float]
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        growth = ", ".join(f"{name} {mib:+.1f}" for name, mib in self.growth_mib.items())
        lines = [
            f"{self.messages} messages in {self.seconds:.0f} s",
            *(f"{count:10d}  {what}" for what, count in self.answers.most_common()),
            f"memory (MiB): {growth}",
            f"good requests, quiet: {_latencies(self.quiet_s)}",
            f"good requests, under attack: {_latencies(self.attacked_s)}",
            f"faults: {self.faults or 'none'}",
        ]
        return "\n".join(lines)


def attack(stack: Stack, send: Attack, messages: int, seed: int) -> Report:
    """Sends so many messages while good requests are served, and looks what has become of the processes."""
    read = {name: len(stack.log(name)) for name in stack.processes}
    with _good_requests(stack) as quiet:
        time.sleep(min(_QUIET_S, messages / 1000))
    warm_up = messages // _WARM_UP
    send(stack, Random(f"warm-up {seed}"), warm_up)
    before, began = anonymous_mib(stack), time.monotonic()
    with _good_requests(stack) as attacked:
        answers = send(stack, Random(seed), messages - warm_up)
    seconds = time.monotonic() - began
    report = Report(messages, seconds, answers, {}, quiet.latencies, attacked.latencies, quiet.wrong + attacked.wrong)
    report.faults += _faults(stack, read)
    after = anonymous_mib(stack)
    report.growth_mib = {name: after[name] - before[name] for name in after}
    report.faults += [f"{name} grew by {g:.1f} MiB" for name, g in report.growth_mib.items() if g > MAX_GROWTH_MIB]
    report.faults += [f"{count} x {what}" for what, count in answers.items() if what.startswith("FAULT")]
    return report


def anonymous_mib(stack: Stack) -> dict[str, float]:
    """The memory of its own that each process has resident."""
    return {name: _status(process.pid, "RssAnon") / 1024 for name, process in _living(stack)}


def _status(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")))


def _living(stack: Stack) -> "list[tuple[str, object]]":
    return [(name, process) for name, process in stack.processes.items() if process.poll() is None]


def _faults(stack: Stack, read: dict[str, int]) -> list[str]:
    faults = [f"{name} has ended ({process.poll()})" for name, process in stack.processes.items() if process.poll()]
    if not faults:
        with contextlib.suppress(AssertionError):
            stack.wait_idle()
            return _in_logs(stack, read)
        faults.append(f"something is still held: {stack.load()}")
    return faults + _in_logs(stack, read)


def _in_logs(stack: Stack, read: dict[str, int]) -> list[str]:
    faults = []
    for name in stack.processes:
        new = stack.log(name)[read.get(name, 0) :]
        for words in _FAULTS:
            if words in new:
                place = new.index(words)
                faults.append(f"in the log of {name}, {new.count(words)} times: {new[place : place + 1500]}")
    return faults


@dataclass
class _Good:
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _good_requests(stack: Stack) -> Iterator[_Good]:
    """Sends one good request after the other, and checks each answer."""
    good, ended = _Good(), threading.Event()
    thread = threading.Thread(target=_send_good, args=(stack, good, ended), daemon=True)
    thread.start()
    try:
        yield good
    finally:
        ended.set()
        thread.join()


def _send_good(stack: Stack, good: _Good, ended: threading.Event) -> None:
    expected: list[int] | None = None
    while not ended.is_set():
        began = time.monotonic()
        try:
            found = stack.generate(token_request([1, 2, 3], _LEGAL_TOKENS), timeout=30).token_ids
        except Exception as error:
            good.wrong.append(f"a good request failed: {error}"[:500])
            return
        expected = expected or found
        good.latencies.append(time.monotonic() - began)
        if found != expected:
            good.wrong.append(f"a good request's answer was {found} instead of {expected}")


def _latencies(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{len(seconds)} served"
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{len(seconds)} served, p50 {percentiles[49] * 1e3:.1f} ms, p99 {percentiles[98] * 1e3:.1f} ms"
