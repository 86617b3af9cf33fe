"""A campaign in which half of the clients have less time than the queue takes: nothing is computed for them."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from octavo.chaos.arena import Arena, Known
from octavo.chaos.client import TIMEOUT_S, Client

# Few run at once, so that most must wait.
ENVIRONMENT: Final = {"OCTAVO_MAX_NUM_SEQS": "4"}
_CLIENTS: Final = 60
_SHORTEST_S, _LONGEST_S = 0.3, 1.5
_OVERDUE: Final = frozenset({"QUEUE_TIMEOUT", "DEADLINE", "DEADLINE_EXCEEDED"})
# What it may take on a busy machine to bring a request, and the end of its time, to the scheduler.
_ON_ITS_WAY_S: Final = 1.0


@dataclass(frozen=True)
class _Hurry:
    """How a hurried client ended: the error's reason, and how long after its time."""

    reason: str
    late_s: float


async def expire(arena: Arena, count: int) -> dict[str, float]:
    """All come at once, `count` times."""
    hurries: list[_Hurry] = []
    for _ in range(count):
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                known = arena.known[number % len(arena.known)]
                group.create_task(_hurry(arena, known, hurries) if number % 2 else _wait(arena, known))
    told = [hurry.late_s for hurry in hurries if hurry.reason in _OVERDUE]
    return {
        "hurried": len(hurries),
        "overdue": len(told),
        "overdue_in_queue": sum(hurry.reason == "QUEUE_TIMEOUT" for hurry in hurries),
        "told_late_p50_s": round(sorted(told)[len(told) // 2], 4) if told else 0.0,
        "told_late_max_s": round(max(told, default=0.0), 4),
    }


async def _wait(arena: Arena, known: Known) -> None:
    await Client(arena.stubs[0], arena.witness, known.named(arena.name())).ask(known.answer)


async def _hurry(arena: Arena, known: Known, hurries: list[_Hurry]) -> None:
    """By the call's deadline, or by the time in the queue alone."""
    request, seconds = known.named(arena.name()), arena.random.uniform(_SHORTEST_S, _LONGEST_S)
    is_call = arena.random.random() < 0.5
    if not is_call:
        request.scheduling.max_queue_time.FromMilliseconds(int(seconds * 1000))
    client = Client(arena.stubs[0], arena.witness, request, timeout_s=seconds if is_call else TIMEOUT_S)
    reason = await client.ask(known.answer, _OVERDUE, seconds + _ON_ITS_WAY_S)
    hurries.append(_Hurry(reason, time.monotonic() - client.came_at - seconds))
