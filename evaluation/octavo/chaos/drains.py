"""Runs campaigns in which every process ends in order and comes again, in this version or another: nobody notices."""

import asyncio
import os
import signal
import time
from typing import Final

from octavo.chaos.system import SystemUnderLoad
from octavo.testbed.history import Struck

_CLIENTS: Final = 32
FRONTENDS: Final = ("frontend", "frontend-1")
_PROCESSES: Final = ("worker-0", "worker-1", "scheduler", *FRONTENDS)
_LONGEST_S: Final = {"worker": 30.0, "scheduler": 10.0, "frontend": 60.0}


async def drain(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Sends SIGTERM to each process in turn, under load, `count` times."""
    slowest: dict[str, float] = {}
    async with system.crowd(_CLIENTS):
        for _ in range(count):
            for name in _PROCESSES:
                await system.until_busy(2, each=2)
                kind, seconds = name.partition("-")[0], await replace(system, name)
                slowest[kind] = max(slowest.get(kind, 0.0), seconds)
        await system.until_busy(2, each=1)
    turned_away = {"turned_away": system.turned_away}
    return {
        "cycles": count,
        **turned_away,
        **{f"{kind}_ended_within_s": round(seconds, 2) for kind, seconds in slowest.items()},
    }


async def replace(system: SystemUnderLoad, name: str, **environment: str) -> float:
    """Asks a process to end and starts it anew, in another environment if one is given. Returns the seconds until it
    had ended, well."""
    began, process = time.monotonic(), system.stack.processes[name]
    system.judge.take(Struck(began, name))
    process.send_signal(signal.SIGTERM)
    status = await asyncio.to_thread(process.wait, _LONGEST_S[name.partition("-")[0]])
    seconds = time.monotonic() - began
    assert status == 0, f"{name} ended with {status} when it was asked to"
    await system.start_again(name, **environment)
    return seconds


# The order for operators: the scheduler is the only one that speaks an older schema than its own.
_ORDER: Final = ("scheduler", "worker-0", "worker-1", *FRONTENDS)


async def upgrade(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Upgrades the processes one by one under load, and rolls back in the opposite order, `count` times. All begin as
    the older version, which the stack's own environment names."""
    ours = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    async with system.crowd(_CLIENTS):
        for _ in range(count):
            for name in _ORDER:
                await system.until_busy(2, each=2)
                await replace(system, name, **ours)
            for name in reversed(_ORDER):
                await system.until_busy(2, each=2)
                await replace(system, name)
        await system.until_busy(2, each=1)
    return {"upgrades": count, "roll_backs": count, "turned_away": system.turned_away}
