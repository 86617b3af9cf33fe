"""Runs campaigns with requests that break whatever computes them, beside innocent requests that must not notice."""

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from octavo.chaos.client import JudgedClient
from octavo.chaos.system import SystemUnderLoad
from octavo.runtime.process.ends import ENDS_VARIABLE, End, OutOfMemoryCount, write_ends
from octavo.testbed.stack import Stack, token_request
from octavo.v1 import generation_pb2 as pb

_LOOKS_EVERY_S: Final = 0.05
_ENDS_TOLD: Final = 16


@dataclass
class Supervisor:
    """`died` are the names of workers, in the order in which that was seen."""

    stack: Stack
    died: list[str] = field(default_factory=list)
    ends: deque[End] = field(default_factory=lambda: deque(maxlen=_ENDS_TOLD))
    _out_of_memory: OutOfMemoryCount = field(default_factory=OutOfMemoryCount)

    async def run(self) -> None:
        """Looks after the workers until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOKS_EVERY_S)

    def look(self) -> None:
        """Does what is to be done now."""
        for name, process in list(self.stack.processes.items()):
            if name.startswith("worker") and process.poll() is not None:
                self.died.append(name)
                status = process.returncode
                self.ends.append(
                    End(process.pid, status, status == -signal.SIGKILL and self._out_of_memory.has_risen())
                )
                self.stack.start_named(name, **{ENDS_VARIABLE: write_ends(self.ends)})


WORKERS: Final = 4
_INNOCENTS: Final = 64
# No other prompt has tokens from 250 on.
_DIES, _SPOILS = [251, 252], [251, 254]
ENVIRONMENT: Final = {"OCTAVO_FAKE_FAULT": "die=251+252@2,nan=251+254@2"}
# With more sequences than that the fake device has no memory.
CROWDED: Final = {"OCTAVO_FAKE_FAULT": "oom=*>8"}
# Twice among others, and once alone.
MAX_DEATHS: Final = 3
_NUM_TOKENS: Final = 30


async def kill_by_request(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Sends `count` requests of which each kills every worker that computes it."""
    most = again = 0
    async with _innocents(system) as supervisor:
        for number in range(count):
            deaths = await _deaths(system, supervisor, number, "QUARANTINED")
            most = max(most, deaths)
            again += await _deaths(system, supervisor, number, "QUARANTINED")
    return {"poisons": count, "most_deaths": most, "deaths_by_repetition": again}


async def spoil(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Sends `count` requests for which the model computes NaN."""
    async with _innocents(system) as supervisor:
        for number in range(count):
            await _ask(system, _poison(_SPOILS, number), "LOGITS_NOT_FINITE")
    return {"poisons": count, "deaths": len(supervisor.died)}


async def run_out(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Sends `count` rounds of more requests than the device has memory for at once."""
    async with contextlib.AsyncExitStack() as held:
        supervisor = await held.enter_async_context(_supervised(system))
        for _ in range(count):
            async with asyncio.TaskGroup() as group:
                for known in system.known:
                    group.create_task(system.ask(known))
    return {"rounds": count, "deaths": len(supervisor.died)}


async def _deaths(system: SystemUnderLoad, supervisor: Supervisor, number: int, reason: str) -> int:
    before = len(supervisor.died)
    await _ask(system, _poison(_DIES, number), reason)
    # By then the supervisor has seen the last death too.
    await _until_whole(system)
    return len(supervisor.died) - before


async def _ask(system: SystemUnderLoad, request: pb.GenerateRequest, reason: str) -> None:
    """Asks, and expects an answer or this error."""
    request.request_id = system.name()
    got = await JudgedClient(system.stubs[0], system.witness, request).ask(None, frozenset({reason} - {""}))
    assert got == reason, f"a poisonous request ended with {got or 'an answer'}, not with {reason or 'an answer'}"


def _poison(run: list[int], number: int) -> pb.GenerateRequest:
    return token_request([number % 250, number // 250, *run, 7], _NUM_TOKENS)


async def _until_whole(system: SystemUnderLoad) -> None:
    await system.until(lambda: len(system.stack.load().workers) == WORKERS)


@contextlib.asynccontextmanager
async def _innocents(system: SystemUnderLoad) -> AsyncIterator[Supervisor]:
    """Keeps the workers busy inside the block, under a supervisor."""
    async with _supervised(system) as supervisor, system.crowd(_INNOCENTS):
        await system.until_busy(WORKERS, each=2)
        yield supervisor
        await _until_whole(system)


@contextlib.asynccontextmanager
async def _supervised(system: SystemUnderLoad) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(system.stack)
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        running.cancel()
