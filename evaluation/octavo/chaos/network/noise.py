"""Runs a campaign on wires that lose and delay messages: streams are slow then, and never wrong."""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from octavo.chaos.client import JudgedClient
from octavo.chaos.report import CampaignReport, in_logs, shortened
from octavo.chaos.system import SystemUnderLoad, system
from octavo.testbed.history import Struck
from octavo.testbed.relay import Noise, Relay, relayed
from octavo.testbed.stack import Process, Stack
from octavo.testbed.tiny_model import write_byte_model

_ENVIRONMENT: Final = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "5", "OCTAVO_NUM_BLOCKS": "4096"}
_QUESTIONS: Final = 20
_TOKENS: Final = 16
_CLIENTS: Final = 8
# Between the scheduler and all frontends, and between it and all workers.
_WIRES: Final = ("frontends", "workers")


@dataclass(frozen=True)
class Weather:
    """Describes what happens to messages, both ways, while every client asks `questions` requests: the share that is
    lost of each wire's, and how late all others are. All connections end every `cut_every_s`, if ever. `allowed` names
    the errors that may come of it."""

    loss: dict[str, float] = field(default_factory=dict)
    delay_s: float = 0.0
    cut_every_s: float = 0.0
    questions: int = 2
    allowed: frozenset[str] = frozenset()


WEATHERS: Final = {
    "delay": Weather(delay_s=0.2),
    "loss": Weather({"frontends": 0.3}, questions=4),
    "resets": Weather(cut_every_s=1.0, questions=40),
    "storm": Weather({"frontends": 0.3}, delay_s=0.1, cut_every_s=3.0),
    # TCP never loses one message of many, so a worker that answers the wrong step, or none, counts as broken, again and
    # again: such a network may end requests, but with no wrong token.
    "broken workers": Weather({"workers": 0.1}, questions=1, allowed=frozenset({"QUARANTINED"})),
}


@dataclass
class NoisyStack(Stack):
    """Puts a relay where all processes but the scheduler look for it."""

    noises: dict[str, Noise] = field(default_factory=dict)
    relays: dict[str, Relay] = field(default_factory=dict)

    def start_named(self, name: str, **environment: str) -> Process:
        """Starts a process. The scheduler binds the sockets that the relays connect to."""
        if name == "scheduler":
            environment = {**{_variable(wire): f"ipc://{self.socket(wire)}" for wire in _WIRES}, **environment}
        return super().start_named(name, **environment)

    def socket(self, wire: str) -> Path:
        """Returns the path at which the scheduler is bound."""
        return self.directory / f"{wire}.sock"

    def set(self, weather: Weather) -> None:
        """Sets the losses and delays of all wires, from the next message on."""
        for wire, noise in self.noises.items():
            noise.loss, noise.delay_s = weather.loss.get(wire, 0.0), weather.delay_s

    def cut(self) -> None:
        """Ends all connections between processes."""
        for relay in self.relays.values():
            relay.cut()


@contextlib.contextmanager
def noisy_stack(model: Path, directory: Path, seed: int) -> Iterator[NoisyStack]:
    """Makes a stack in which nothing is started yet, and the weather is fine."""
    public = {wire: directory / f"noisy-{wire}.sock" for wire in _WIRES}
    environment = {**_ENVIRONMENT, **{_variable(wire): f"ipc://{path}" for wire, path in public.items()}}
    with NoisyStack(model, directory, environment) as stack, contextlib.ExitStack() as relays:
        for wire, path in public.items():
            noise = stack.noises[wire] = Noise(random=Random(seed))
            stack.relays[wire] = relays.enter_context(relayed(stack.socket(wire), path, noise.carry))
        yield stack


def run(weathers: dict[str, Weather], seed: int = 0) -> CampaignReport:
    """Runs one weather after the other, by their names."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        model = Path(parent) / "byte-model"
        write_byte_model(model)
        with noisy_stack(model, Path(parent) / "run", seed) as stack:
            return asyncio.run(_run(stack, weathers, seed))


async def _run(stack: NoisyStack, weathers: dict[str, Weather], seed: int) -> CampaignReport:
    async with system(stack, seed) as found:
        await found.learn(_QUESTIONS, _TOKENS)
        began, figures = time.monotonic(), dict[str, float]()
        for name, weather in weathers.items():
            found.judge.take(Struck(time.monotonic(), name))
            reasons, took = await _brave(found, stack, weather)
            figures |= {f"{name} {figure}": value for figure, value in _spread(took).items()}
            figures |= {f"{name} {reason}": float(count) for reason, count in reasons.items() if reason}
        seconds = round(time.monotonic() - began, 1)
        stack.set(Weather())
        await found.rest()
        faults = shortened([*found.judge.faults, *_unexpected(stack)])
        lost = {f"{wire}_messages_lost": float(noise.lost) for wire, noise in stack.noises.items()}
        return CampaignReport(
            "noise", len(weathers), seconds, found.judge.num_whole, found.kinds, figures | lost, faults
        )


def _unexpected(stack: NoisyStack) -> list[str]:
    """Exceptions in logs that no lost message explains: a plan may name what only a lost message announced."""
    return [fault for fault in in_logs(stack) if not (stack.noises["workers"].lost and "PlanError" in fault)]


async def _brave(system: SystemUnderLoad, stack: NoisyStack, weather: Weather) -> tuple[Counter[str], list[float]]:
    """Sends every client's questions, which get their answers, or errors for these reasons. Returns how long each took,
    in seconds."""
    reasons, took = Counter[str](), list[float]()

    async def ask_all(client: int) -> None:
        for number in range(weather.questions):
            known = system.known[(client + number * _CLIENTS) % len(system.known)]
            asking = JudgedClient(system.stubs[0], system.witness, known.named(system.name()))
            reasons[await asking.ask(known.answer, weather.allowed)] += 1
            system.kinds[known.question.kind] = system.kinds.get(known.question.kind, 0) + 1
            took.append(time.monotonic() - asking.came_at)

    stack.set(weather)
    async with _resetting(stack, weather.cut_every_s):
        await asyncio.gather(*map(ask_all, range(_CLIENTS)))
    return reasons, took


@contextlib.asynccontextmanager
async def _resetting(stack: NoisyStack, every_s: float) -> AsyncIterator[None]:
    async def cut_again_and_again() -> None:
        while every_s:
            await asyncio.sleep(every_s)
            stack.cut()

    cutting = asyncio.create_task(cut_again_and_again())
    try:
        yield
    finally:
        cutting.cancel()


def _spread(took: Sequence[float]) -> dict[str, float]:
    return {"answer_p50_s": round(sorted(took)[len(took) // 2], 2), "answer_max_s": round(max(took), 2)}


def _variable(wire: str) -> str:
    return f"OCTAVO_{wire.removesuffix('s').upper()}_ENDPOINT"
