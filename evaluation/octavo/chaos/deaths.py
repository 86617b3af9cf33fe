"""Runs campaigns in which processes die or stand still, and all streams go on."""

import asyncio
import signal
import statistics
import time
from typing import Final

from octavo.chaos.client import JudgedClient
from octavo.chaos.system import SystemUnderLoad
from octavo.testbed.history import Aftermath, Struck
from octavo.testbed.stack import token_request
from octavo.v1 import admin_pb2

NUM_CLIENTS: Final = 64
_LONGEST_PAUSE_S: Final = 0.3
_FREEZE_S: Final = 3.0
# No other prompt has tokens from 250 on.
_BAIT: Final = (251, 253)
_BAIT_TOKENS: Final = 20
# After so many a worker is known well enough for a step that never ends to stand out.
_WARM_STEPS: Final = 150


async def kill_workers(
    system: SystemUnderLoad, count: int, clients: int = NUM_CLIENTS, each: int = 4
) -> dict[str, float]:
    """Kills (-9) one of two workers while both run so many requests each, again and again."""
    async with system.crowd(clients):
        for _ in range(count):
            await _until_disturbable(system, each)
            await system.kill(_a_worker(system))
        await system.until_busy(2, each=1)
    return felt(system.judge.aftermaths, only_noticed=True)


async def kill_schedulers(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Kills (-9) the only scheduler, `count` times."""
    async with system.crowd(NUM_CLIENTS):
        for _ in range(count):
            await _until_disturbable(system)
            await system.kill("scheduler")
        await system.until_busy(2, each=1)
    return felt(system.judge.aftermaths, only_noticed=False)


async def freeze_workers(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Stops a worker (SIGSTOP), and continues it (SIGCONT) when others have long done its work."""
    async with system.crowd(NUM_CLIENTS):
        for _ in range(count):
            await _until_disturbable(system)
            victim = _a_worker(system)
            system.strike(victim, signal.SIGSTOP)
            await asyncio.sleep(_FREEZE_S)
            await system.until(lambda: len(system.stack.load().workers) == 1)
            system.stack.processes[victim].send_signal(signal.SIGCONT)
        await system.until_busy(2, each=1)
    return felt(system.judge.aftermaths, only_noticed=True)


async def hang_workers(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Makes a worker hang in a step, the interpreter's lock held, while its sockets live; it is then killed and
    replaced."""
    async with system.crowd(NUM_CLIENTS):
        for _ in range(count):
            victim = _a_worker(system)
            system.stack.processes[victim].send_signal(signal.SIGTERM)
            await system.start_again(victim, OCTAVO_FAKE_FAULT=f"hang={'+'.join(map(str, _BAIT))}@2")
            await system.until(lambda: all(worker.steps >= _WARM_STEPS for worker in system.stack.load().workers))
            system.judge.take(Struck(time.monotonic(), victim))
            await _bait(system, victim)
            await system.kill(victim)
        await system.until_busy(2, each=1)
    return felt(system.judge.aftermaths[::2], only_noticed=True)


async def _bait(system: SystemUnderLoad, victim: str) -> None:
    """Sends the victim what makes it hang, and waits until it is lost. The others take nothing new until the
    request has begun there: another worker would serve it like any other."""

    def workers() -> set[str]:
        return {worker.id for worker in system.stack.load().workers}

    others, admin = workers() - {victim}, system.stack.admin
    bait = JudgedClient(
        system.stubs[0], system.witness, token_request(list(_BAIT), _BAIT_TOKENS, request_id=system.name())
    )
    for other in others:
        await asyncio.to_thread(admin.CordonWorker, admin_pb2.CordonWorkerRequest(worker_id=other), timeout=10)
    async with asyncio.TaskGroup() as group:
        group.create_task(bait.ask(None))
        await system.until(lambda: bool(bait.token_at))
        for other in others:
            await asyncio.to_thread(admin.ReadmitWorker, admin_pb2.ReadmitWorkerRequest(worker_id=other), timeout=10)
        await system.until(lambda: victim not in workers())


def felt(aftermaths: list[Aftermath], *, only_noticed: bool) -> dict[str, float]:
    """Returns how long streams were silent, and how soon they were notified: of the notified streams, or of all that
    had begun."""
    gaps = [
        gap
        for aftermath in aftermaths
        for request, gap in aftermath.gap_s.items()
        if request in aftermath.noticed_s or not only_noticed
    ]
    noticed = [seconds for aftermath in aftermaths for seconds in aftermath.noticed_s.values()]
    return {
        "strikes": len(aftermaths),
        "streams_disturbed": len(gaps),
        **_spread("gap", gaps),
        **_spread("noticed_after", noticed),
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99 = (_quantile(seconds, percent) for percent in (50, 99))
    return {f"{name}_p50_s": round(p50, 4), f"{name}_p99_s": round(p99, 4), f"{name}_max_s": round(max(seconds), 4)}


def _quantile(seconds: list[float], percent: int) -> float:
    return statistics.quantiles([*seconds, seconds[-1]], n=100, method="inclusive")[percent - 1]


async def _until_disturbable(system: SystemUnderLoad, each: int = 4) -> None:
    """Waits until both workers are busy, and then for a random moment."""
    await system.until_busy(2, each)
    await asyncio.sleep(system.random.uniform(0, _LONGEST_PAUSE_S))


def _a_worker(system: SystemUnderLoad) -> str:
    return system.random.choice(("worker-0", "worker-1"))


# One thread: a team of two collapses wherever another process wants a core for a moment.
REAL_MODEL_ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "cpu",
    "OCTAVO_NUMERICS": "exact",
    "OCTAVO_THREADS": "1",
    "OCTAVO_NUM_BLOCKS": "256",
}
_REAL_CLIENTS: Final = 4


async def kill_real_workers(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Kills (-9) one of two workers with the bundled model, under few streams, `count` times."""
    return await kill_workers(system, count, _REAL_CLIENTS, each=1)
