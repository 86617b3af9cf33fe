"""Runs the campaign of neighbours: each hostile input beside an innocent client, judged by what that client sees."""

import asyncio
import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from octavo.chaos.fuzz.hostile import OVER_TLS, attack
from octavo.chaos.fuzz.neighbour import (
    HEADER,
    AttackedServer,
    NeighbourBounds,
    Seen,
    connection,
    judged,
    neighbour,
    request_bytes,
    row,
)
from octavo.testbed.credentials import make_authority, make_certificate
from octavo.testbed.stack import Stack, free_address

# Of an input that has no end of its own: longer than the frontend waits for clients that do not read.
_SECONDS: Final = 8.0
_ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "fake",
    "OCTAVO_NUM_BLOCKS": "200000",
    "OCTAVO_MAX_NUM_SEQS": "1024",
    "OCTAVO_MAX_WORK_TOKENS": "10000000",
    "OCTAVO_FAKE_STEP_MS": "5",
    "OCTAVO_STALL_TIMEOUT": "5",
}


@contextlib.contextmanager
def served(model: Path, directory: Path, *, tls: bool = False) -> Iterator[tuple[Stack, AttackedServer]]:
    """Starts a scheduler, a frontend on ports of TCP, maybe with `tls`, and a fake worker."""
    http, grpc = free_address(), free_address()
    with Stack(model, directory, _ENVIRONMENT) as stack:
        stack.start("scheduler")
        settings, authority = _certified(directory) if tls else ({}, None)
        stack.start("frontend", OCTAVO_HTTP_LISTEN=http, OCTAVO_LISTEN=grpc, **settings)
        stack.start("worker", "worker-0")
        target = AttackedServer(_split(http), _split(grpc), authority)
        stack.wait_for(lambda: asyncio.run(_is_ready(target)), 120)
        yield stack, target


async def beside(target: AttackedServer, name: str, scale: float, seconds: float) -> tuple[Seen, Counter[str]]:
    """Runs the input called `name` from another process beside a neighbour. Returns what the neighbour has seen, and
    the answers to the input."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        # The process is there before the neighbour counts.
        await loop.run_in_executor(pool, attack, "nothing", target, 1.0, 0.0)
        async with neighbour(target) as seen:
            answers = await loop.run_in_executor(pool, attack, name, target, scale, seconds)
    return seen, answers


def campaign(
    model: Path,
    directory: Path,
    names: Sequence[str],
    bounds: NeighbourBounds,
    scale: float,
    echo: Callable[[str], Any],
) -> bool:
    """Runs one input after the other, each beside a neighbour of its own, and prints a table. Returns whether all were
    bearable."""
    echo(HEADER)
    plain, over_tls = [n for n in names if n not in OVER_TLS], [n for n in names if n in OVER_TLS]
    found = [_all_bearable(model, directory, plain, bounds, scale, echo, tls=False)] if plain else []
    found += [_all_bearable(model, directory, over_tls, bounds, scale, echo, tls=True)] if over_tls else []
    return all(found)


def _all_bearable(
    model: Path,
    directory: Path,
    names: Sequence[str],
    bounds: NeighbourBounds,
    scale: float,
    echo: Callable[[str], Any],
    *,
    tls: bool,
) -> bool:
    bearable = True
    with served(model, directory, tls=tls) as (stack, target):
        for name in names:
            seen, answers = asyncio.run(beside(target, name, scale, _SECONDS))
            faults = judged(seen, bounds)
            faults += [f"{each} has ended" for each, process in stack.processes.items() if process.poll() is not None]
            bearable = bearable and not faults
            echo(row(name, seen, faults))
            if answers:
                echo("    " + ", ".join(f"{count} x {what}" for what, count in answers.most_common(4)))
            if any(process.poll() is not None for process in stack.processes.values()):
                break
            with contextlib.suppress(AssertionError):
                stack.wait_idle()
    return bearable


def _certified(directory: Path) -> tuple[dict[str, str], Path]:
    """Makes the settings of a frontend's certificate, and returns them with the authority that has signed it."""
    authority = make_authority(directory, "authority")
    pair = make_certificate(authority, "localhost")
    settings = {"OCTAVO_TLS_CERTIFICATE": str(pair.certificate), "OCTAVO_TLS_KEY": str(pair.key)}
    return settings, authority.certificate


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _is_ready(target: AttackedServer) -> bool:
    try:
        async with connection(target) as (reader, writer):
            writer.write(request_bytes("/ready"))
            answer = await reader.read()
    except OSError:
        return False
    return answer.startswith(b"HTTP/1.1 200")
