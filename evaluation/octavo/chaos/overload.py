"""Runs campaigns with more requests than can be served: their time runs out in the queue, or they are refused."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import grpc

from octavo.chaos.client import TIMEOUT_S, JudgedClient
from octavo.chaos.memory import memory_mib
from octavo.chaos.system import Known, SystemUnderLoad
from octavo.testbed.grpc_calls import retry_delay_of

# Few run at once, so that most must wait.
EXPIRE_ENVIRONMENT: Final = {"OCTAVO_MAX_NUM_SEQS": "4"}
_CLIENTS: Final = 60
_SHORTEST_S, _LONGEST_S = 0.3, 1.5
_OVERDUE: Final = frozenset({"QUEUE_TIMEOUT", "DEADLINE", "DEADLINE_EXCEEDED"})
# What it may take on a busy machine to bring a request, and the end of its time, to the scheduler.
_ON_ITS_WAY_S: Final = 1.0


@dataclass(frozen=True)
class _Hurry:
    """Holds the end of a hurried client: the error's reason, and how long it came after the client's time."""

    reason: str
    late_s: float


async def expire(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Lets all clients come at once, `count` times."""
    hurries: list[_Hurry] = []
    for _ in range(count):
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                known = system.known[number % len(system.known)]
                group.create_task(_hurry(system, known, hurries) if number % 2 else _wait(system, known))
    late = [hurry.late_s for hurry in hurries if hurry.reason in _OVERDUE]
    return {
        "hurried": len(hurries),
        "overdue": len(late),
        "overdue_in_queue": sum(hurry.reason == "QUEUE_TIMEOUT" for hurry in hurries),
        "told_late_p50_s": round(sorted(late)[len(late) // 2], 4) if late else 0.0,
        "told_late_max_s": round(max(late, default=0.0), 4),
    }


async def _wait(system: SystemUnderLoad, known: Known) -> None:
    await JudgedClient(system.stubs[0], system.witness, known.named(system.name())).ask(known.answer)


async def _hurry(system: SystemUnderLoad, known: Known, hurries: list[_Hurry]) -> None:
    """Asks with too little time, limited by the call's deadline or by the time in the queue alone."""
    request, seconds = known.named(system.name()), system.random.uniform(_SHORTEST_S, _LONGEST_S)
    is_call = system.random.random() < 0.5
    if not is_call:
        request.scheduling.max_queue_time.FromMilliseconds(int(seconds * 1000))
    client = JudgedClient(system.stubs[0], system.witness, request, timeout_s=seconds if is_call else TIMEOUT_S)
    reason = await client.ask(known.answer, _OVERDUE, seconds + _ON_ITS_WAY_S)
    hurries.append(_Hurry(reason, time.monotonic() - client.came_at - seconds))


# Requests that the frontend admits are done in about two seconds.
OVERLOAD_ENVIRONMENT: Final = {
    "OCTAVO_FAKE_STEP_MS": "20",
    "OCTAVO_MAX_NUM_SEQS": "16",
    "OCTAVO_MAX_WORK_TOKENS": "4000",
}
_DEADLINE_S: Final = 6.0
_FIRST_TOKEN_S: Final = 3.0
_SATURATING: Final = 48
_CALM_S: Final = 10.0
_EXCUSED: Final = frozenset({"TOO_MUCH_WORK", "TOO_MANY_REQUESTS", "QUEUE_FULL", "DEADLINE", "DEADLINE_EXCEEDED"})


@dataclass
class _Outcomes:
    """Counts the ends of clients: how long each answer and its first token took, and each refusal."""

    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    late: int = 0
    without_retry: int = 0
    seconds: float = 0.0

    def take(self, client: JudgedClient, reason: str) -> None:
        seconds = time.monotonic() - client.came_at
        if client.token_at:
            self.first_s.append(client.token_at[0] - client.came_at)
        if not reason:
            self.whole_s.append(seconds)
        elif client.error is not None and client.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.refused_s.append(seconds)
            self.without_retry += retry_delay_of(client.error) is None
        else:
            self.late += 1


async def overload(system: SystemUnderLoad, count: int) -> dict[str, float]:
    """Offers `count` seconds of five times as many clients as can be served, then half as many."""
    peak = await _capacity(system)
    calm = await _arrive(system, peak / 2, _CALM_S)
    before = memory_mib(system.stack)
    crowded = await _arrive(system, 5 * peak, count)
    after = memory_mib(system.stack)
    recovered = await _arrive(system, peak / 2, _CALM_S)
    accepted = len(crowded.whole_s) + crowded.late
    return {
        "peak_per_s": round(peak, 1),
        "goodput_of_peak": round(len(crowded.whole_s) / crowded.seconds / peak, 3),
        "refused": len(crowded.refused_s),
        "refused_p50_s": round(_at(crowded.refused_s, 0.5), 4),
        "refused_p99_s": round(_at(crowded.refused_s, 0.99), 4),
        "refused_without_retry": crowded.without_retry,
        "late_share": round(crowded.late / max(1, accepted), 4),
        "slow_first_token_share": round(sum(s > _FIRST_TOKEN_S for s in crowded.first_s) / max(1, accepted), 4),
        "calm_p50_s": round(_at(calm.whole_s, 0.5), 3),
        "recovered_p50_s": round(_at(recovered.whole_s, 0.5), 3),
        **{f"grown_{name}_mib": round(after[name] - before[name], 1) for name in after if name in before},
    }


async def _capacity(system: SystemUnderLoad) -> float:
    """Answers a second when there is always somebody waiting, but nobody refused."""
    async with system.crowd(_SATURATING):
        await asyncio.sleep(2.0)
        whole, began = system.judge.num_whole, time.monotonic()
        await asyncio.sleep(_CALM_S)
        return (system.judge.num_whole - whole) / (time.monotonic() - began)


async def _arrive(system: SystemUnderLoad, rate: float, seconds: float) -> _Outcomes:
    """Clients who come by themselves, so many a second, whatever becomes of those before."""
    outcomes, began = _Outcomes(), time.monotonic()
    now, end = began, began + seconds
    async with asyncio.TaskGroup() as group:
        while now < end:
            group.create_task(_ask(system, outcomes))
            now += system.random.expovariate(rate)
            await asyncio.sleep(max(0.0, now - time.monotonic()))
    outcomes.seconds = time.monotonic() - began
    return outcomes


async def _ask(system: SystemUnderLoad, outcomes: _Outcomes) -> None:
    known = system.random.choice(system.known)
    client = JudgedClient(system.stubs[0], system.witness, known.named(system.name()), timeout_s=_DEADLINE_S)
    outcomes.take(client, await client.ask(known.answer, _EXCUSED))


def _at(seconds: list[float], share: float) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))] if seconds else 0.0
