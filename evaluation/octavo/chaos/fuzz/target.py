"""Runs the processes that are attacked while they serve good requests, and judges what may not happen to them."""

import contextlib
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import grpc

from octavo.testbed.stack import Stack, token_request


@dataclass(frozen=True)
class Attack:
    """Describes an attack: `send` sends so many messages, and counts what came of them, by words. One that `lies` is
    believed by right, as a worker's tokens are: while it lasts, good requests need not be answered, but after it they
    must."""

    send: Callable[[Stack, Random, int], Counter[str]]
    lies: bool = False


MAX_GROWTH_MIB: Final = 10.0
# Of connections that are being closed, or kept for the next.
_MORE_FILES: Final = 8
# The scheduler's newest records, which it keeps for those who watch it: as many as fit, and few at first.
_KEPT_MIB: Final = {"scheduler": 17.0}
# How the words for an answer begin that nobody may get.
FAULT: Final = "FAULT"
_LEGAL_TOKENS: Final = 8
_QUIET_S: Final = 2.0
# Less where the attack is short: there it is no time that is measured.
_QUIET_MESSAGES: Final = 5000
# An exception in a log, by its last line; and those that are foreseen: a plan that cannot be.
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(.*)$", re.MULTILINE)
_FORESEEN: Final = ("octavo.worker.step.plan_checks.PlanError",)
_SHOWN: Final = 1500
# The share of an attack that fills caches and pools before memory is measured.
_WARM_UP: Final = 20


@dataclass
class AttackReport:
    """Holds the outcome of an attack. `faults` are the violations."""

    messages: int
    seconds: float
    answers: Counter[str]
    growth_mib: dict[str, float]
    quiet_s: list[float]
    attacked_s: list[float]
    faults: list[str]

    def __str__(self) -> str:
        growth = ", ".join(f"{name} {mib:+.1f}" for name, mib in self.growth_mib.items())
        lines = [
            f"{self.messages} messages in {self.seconds:.0f} s",
            *(f"{count:10d}  {what}" for what, count in self.answers.most_common()),
            f"memory (MiB): {growth}",
            f"good requests, quiet: {_latencies(self.quiet_s)}",
            f"good requests, under attack: {_latencies(self.attacked_s)}",
            *(f"FAULT: {fault}" for fault in self.faults or ["none"]),
        ]
        return "\n".join(lines)


def run(stack: Stack, attack: Attack, messages: int, seed: int) -> AttackReport:
    """Sends so many messages while good requests are served, and looks what has become of the processes."""
    read = {name: len(stack.log(name)) for name in stack.processes}
    with _good_requests(stack) as quiet:
        time.sleep(min(_QUIET_S, messages / _QUIET_MESSAGES))
    warm_up = messages // _WARM_UP
    attack.send(stack, Random(f"warm-up {seed}"), warm_up)
    before, files, began = anonymous_mib(stack), open_files(stack), time.monotonic()
    with contextlib.nullcontext(_Good()) if attack.lies else _good_requests(stack) as attacked:
        answers = attack.send(stack, Random(seed), messages - warm_up)
    seconds = time.monotonic() - began
    faults = [*quiet.wrong, *attacked.wrong, *_ended(stack), *_in_logs(stack, read)]
    if not _ended(stack):
        faults += [*_held(stack), *_left_open(stack, files)]
        with _good_requests(stack) as afterwards:
            pass
        faults += afterwards.wrong
    after = anonymous_mib(stack)
    growth = {name: after[name] - before[name] for name in after if name in before}
    faults += [f"{name} grew by {mib:.1f} MiB" for name, mib in growth.items() if mib > _allowed_mib(name)]
    faults += [f"{count} x {what}" for what, count in answers.items() if what.startswith(FAULT)]
    return AttackReport(messages, seconds, answers, growth, quiet.latencies, attacked.latencies, faults)


def _allowed_mib(name: str) -> float:
    return MAX_GROWTH_MIB + _KEPT_MIB.get(name.split()[0], 0.0)


def anonymous_mib(stack: Stack) -> dict[str, float]:
    """Returns the memory of its own that each process has resident, in MiB."""
    living = {name: process for name, process in stack.processes.items() if process.poll() is None}
    return {f"{name} {process.pid}": _anonymous_kib(process.pid) / 1024 for name, process in living.items()}


def _anonymous_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")))


def open_files(stack: Stack) -> dict[str, int]:
    """Counts the files and sockets that each process has open."""
    return {
        f"{name} {process.pid}": len(os.listdir(f"/proc/{process.pid}/fd"))
        for name, process in stack.processes.items()
        if process.poll() is None
    }


def _left_open(stack: Stack, before: dict[str, int]) -> list[str]:
    def more() -> dict[str, int]:
        return {
            name: n - before[name] for name, n in open_files(stack).items() if n - before.get(name, n) > _MORE_FILES
        }

    try:
        stack.wait_for(lambda: not more())
    except AssertionError:
        return [f"{name} has {count} more files open" for name, count in more().items()]
    return []


def _ended(stack: Stack) -> list[str]:
    return [f"{name} has ended with {process.poll()}" for name, process in stack.processes.items() if process.poll()]


def _held(stack: Stack) -> list[str]:
    try:
        stack.wait_idle()
    except AssertionError:
        return [f"something is still held: {stack.load()}"]
    return []


def _in_logs(stack: Stack, read: dict[str, int]) -> list[str]:
    faults = []
    for name in stack.processes:
        found = [
            trace
            for trace in _TRACEBACK.finditer(stack.log(name), read.get(name, 0))
            if not trace[1].startswith(_FORESEEN)
        ]
        kinds = Counter(trace[1] for trace in found)
        if found:
            faults.append(f"in the log of {name}: {dict(kinds)}, first {found[0][0][-_SHOWN:]}")
    return faults


@dataclass
class _Good:
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _good_requests(stack: Stack) -> Iterator[_Good]:
    """Sends one good request after the other, one at least, and checks each answer."""
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
    while expected is None or not ended.is_set():
        began = time.monotonic()
        try:
            found = stack.generate(token_request([1, 2, 3], _LEGAL_TOKENS), timeout=60).token_ids
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


_CLIENTS: Final = 4
_LONGEST_S: Final = 2.0


@contextlib.contextmanager
def impatient_crowd(stack: Stack, rng: Random) -> Iterator[None]:
    """Keeps a few clients asking inside the block, each one thing after the other."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(stack, Random(rng.random()), ended), daemon=True) for _ in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _ask(stack: Stack, rng: Random, ended: threading.Event) -> None:
    while not ended.is_set():
        request = token_request(rng.choices(range(200), k=rng.randint(1, 40)), rng.randint(1, 60))
        request.sampling.num_sequences = rng.choice([1, 1, 3])
        if rng.random() < 0.2:
            request.sampling.beam_search.beam_width = 3
            request.sampling.num_sequences = 1
        if rng.random() < 0.3:
            request.response.top_logprobs = request.response.prompt_logprobs = 2
        with contextlib.suppress(grpc.RpcError):
            for _ in stack.stream(request, rng.uniform(0.1, _LONGEST_S)):
                pass
        ended.wait(0.01)
