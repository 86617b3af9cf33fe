"""Runs a campaign that takes long: something happens all the while, and nothing grows."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from octavo.chaos.departures import leave_all
from octavo.chaos.memory import handles, memory_mib, steepest_slope
from octavo.chaos.system import SystemUnderLoad
from octavo.testbed.stack import Stack

_CLIENTS: Final = 24
_EVERY_S: Final = 30.0
_SAMPLED_EVERY_S: Final = 5.0
_LEAVING: Final = 50
_FREEZE_S: Final = 3.0
# The first part of the time fills caches. Only in it do those processes die whose memory is then looked at.
_WARM_UP: Final = 1 / 3
_WATCHED: Final = ("frontend", "scheduler", "worker-0")
_VICTIM: Final = "worker-1"
# Connections that are being closed, or kept for the next.
MORE_HANDLES: Final = 16

Trouble = Callable[[SystemUnderLoad], Awaitable[None]]


@dataclass
class _Samples:
    """Samples the memory of each process, with the times."""

    times_s: list[float] = field(default_factory=list)
    mib: list[dict[str, float]] = field(default_factory=list)

    async def follow(self, stack: Stack) -> None:
        while True:
            self.times_s.append(time.monotonic())
            self.mib.append(memory_mib(stack))
            await asyncio.sleep(_SAMPLED_EVERY_S)

    def slopes(self) -> dict[str, float]:
        """Returns the steepest growth of each process that the samples allow, in MiB an hour."""
        return {name: steepest_slope(self.times_s, [mib[name] for mib in self.mib]) for name in _WATCHED}


async def soak(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Runs `count` minutes with a fault every half minute."""
    seconds = 60.0 * count
    await _trouble(system, _WARM_UP * seconds, (_kill, _kill_scheduler, _freeze, _leave, _stop))
    await asyncio.to_thread(system.stack.wait_idle)
    before, samples = handles(system.stack), _Samples()
    following = asyncio.create_task(samples.follow(system.stack))
    faults = await _trouble(system, (1 - _WARM_UP) * seconds, (_kill, _freeze, _leave, _stop))
    following.cancel()
    await asyncio.to_thread(system.stack.wait_idle)
    after = handles(system.stack)
    return {
        "faults": faults,
        **{f"{name}_mib_per_hour_at_most": round(slope, 2) for name, slope in samples.slopes().items()},
        **{f"{name}_mib": round(samples.mib[-1][name], 1) for name in _WATCHED},
        **{f"{name}_more_handles": after[name] - before[name] for name in _WATCHED},
    }


async def _trouble(system: SystemUnderLoad, seconds: float, kinds: tuple[Trouble, ...]) -> int:
    """Makes one fault after the other, all kinds in turn. Returns their number."""
    end, faults = time.monotonic() + seconds, 0
    async with system.crowd(_CLIENTS):
        while (remaining := end - time.monotonic()) > 0:
            await asyncio.sleep(min(_EVERY_S, remaining))
            await kinds[faults % len(kinds)](system)
            faults += 1
    return faults


async def _kill(system: SystemUnderLoad) -> None:
    await system.kill(_VICTIM)


async def _kill_scheduler(system: SystemUnderLoad) -> None:
    await system.kill("scheduler")


async def _freeze(system: SystemUnderLoad) -> None:
    system.strike(_VICTIM, signal.SIGSTOP)
    await asyncio.sleep(_FREEZE_S)
    system.stack.processes[_VICTIM].send_signal(signal.SIGCONT)


async def _stop(system: SystemUnderLoad) -> None:
    system.strike(_VICTIM, signal.SIGTERM)
    await system.start_again(_VICTIM)


async def _leave(system: SystemUnderLoad) -> None:
    await leave_all(system, _LEAVING)
