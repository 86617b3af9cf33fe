"""What happens beside the requests of a run: commands at their times, such as one that restarts a worker, and what the
scheduler counts meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from octavo.loadgen.servers import TargetError
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

_TIMEOUT_S = 10.0
# Tokens of prompts that were found, by worker and tier.
FoundTokens = dict[tuple[str, str], int]


@dataclass(frozen=True)
class TimedCommand:
    """Describes a shell's command that begins `at_s` seconds after the start of a run, and how it ended (None: it had
    not when the run did)."""

    at_s: float
    command: str
    status: int | None = None


async def run_at(commands: Sequence[TimedCommand]) -> list[TimedCommand]:
    """Runs each command at its time, and returns how they ended. What is not over when this is cancelled goes on."""
    return list(await asyncio.gather(*map(_run_at, commands)))


async def _run_at(command: TimedCommand) -> TimedCommand:
    await asyncio.sleep(command.at_s)
    process = await asyncio.create_subprocess_shell(command.command, stdin=asyncio.subprocess.DEVNULL)
    return TimedCommand(command.at_s, command.command, await process.wait())


async def found_tokens(admin_address: str) -> FoundTokens:
    """Asks the scheduler's Admin service what its workers have found in each tier of their prefix caches. Raises
    `TargetError` if it does not answer."""
    async with grpc.aio.insecure_channel(admin_address) as channel:
        try:
            load = await services.AdminServiceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(
                f"the scheduler's Admin service at {admin_address} does not answer: {error.details()};"
                " see --scheduler-admin"
            ) from error
    return {
        (worker.id, pb.Tier.Name(tier.tier).removeprefix("TIER_").lower()): tier.hit_tokens
        for worker in load.workers
        for tier in worker.tiers
    }


def found_between(before: FoundTokens, after: FoundTokens) -> dict[str, int]:
    """Returns by tier what was found between two answers. A worker that was started anew has counted from 0, and what
    its process before had found since the first answer is in neither."""
    found: dict[str, int] = {}
    for (worker, tier), count in after.items():
        known = before.get((worker, tier), 0)
        found[tier] = found.get(tier, 0) + (count - known if count >= known else count)
    return {tier: count for tier, count in found.items() if count}
