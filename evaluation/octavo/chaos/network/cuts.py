"""A campaign in which links between hosts fail for a while, and all streams go on."""

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from octavo.chaos.arena import Arena
from octavo.chaos.network.hosts import CLIENT, HOSTS, NetworkStack, network_stack
from octavo.chaos.network.lasting import LastingStub
from octavo.chaos.report import Report, in_logs, shortened
from octavo.testbed.history import Struck
from octavo.testbed.tiny_model import write_byte_model

_STEP_S: Final = 0.02
_ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "fake",
    "OCTAVO_FAKE_STEP_MS": f"{1000 * _STEP_S:g}",
    "OCTAVO_NUM_BLOCKS": "16384",
}
_CLIENTS: Final = 16
_QUESTIONS: Final = 20
# More than a stream may last beyond the cut.
_EXTRA_TOKENS: Final = 40
# From when all are busy to the cut: most streams have begun by then.
_PAUSE_S: Final = (0.3, 0.8)
# Longer than any pause between two tokens where all is well.
_STILL_S: Final = 0.5
_RECOVERY_S: Final = 120.0

LINKS: Final = {
    "frontend/scheduler": ("frontend", "scheduler"),
    "scheduler/worker": ("scheduler", "worker-0"),
    "client/frontend": (CLIENT, "frontend"),
}
WAYS: Final = ("there", "back", "both", "unplugged")


@dataclass(frozen=True)
class Cut:
    """What is lost for some seconds: what the first end of a link says, what the second says, both, or all that the
    second says and hears."""

    link: str
    way: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.link}:{self.way}:{self.seconds:g}"

    @property
    def longest_gap_s(self) -> float:
        """How long a stream may stand still: two seconds more than the cut; or what it takes to move elsewhere, or for
        a client to find out that its connection is lost."""
        return max(self.seconds + 2.0, 10.0 if self.link == "client/frontend" else 5.0)


ALL: Final = [Cut(*each) for each in itertools.product(LINKS, WAYS, (1.0, 10.0))]


def named(name: str) -> Cut:
    """Raises `ValueError` if there is no such cut."""
    link, way, seconds = name.split(":") if name.count(":") == 2 else ("", "", "")
    if link not in LINKS or way not in WAYS:
        raise ValueError(f"{name!r} is no cut; write LINK:WAY:SECONDS, with {', '.join(LINKS)} and {', '.join(WAYS)}")
    return Cut(link, way, float(seconds))


def run(cuts: Sequence[Cut], seed: int = 0, tell: Callable[[str], None] = lambda line: None) -> Report:
    """One cut after the other, under load. Only in a process started by `octavo.testbed.netns.in_own_network`."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        model = Path(parent) / "byte-model"
        write_byte_model(model)
        with network_stack(model, Path(parent) / "run", _ENVIRONMENT) as stack:
            return asyncio.run(_run(stack, cuts, seed, tell))


async def _run(stack: NetworkStack, cuts: Sequence[Cut], seed: int, tell: Callable[[str], None]) -> Report:
    async with _arena(stack, seed) as arena:
        # Most streams are still going on when the link comes back.
        await arena.learn(_QUESTIONS, _EXTRA_TOKENS + int(max(cut.seconds for cut in cuts) / _STEP_S))
        began, figures, late = time.monotonic(), dict[str, float](), list[str]()
        async with arena.crowd(_CLIENTS):
            for cut in cuts:
                gaps = await _suffer(arena, stack, cut)
                figures |= _figures(cut, gaps)
                late += [f"{cut}: a stream stood still for {gap:.1f} s" for gap in gaps if gap > cut.longest_gap_s]
                tell(f"{cut}: {len(gaps)} streams, the longest gap {max(gaps, default=0.0):.2f} s")
        seconds = round(time.monotonic() - began, 1)
        await arena.rest()
        faults = shortened([*arena.judge.faults, *in_logs(stack), *late])
        return Report("cuts", len(cuts), seconds, arena.judge.num_whole, arena.kinds, figures, faults)


@contextlib.asynccontextmanager
async def _arena(stack: NetworkStack, seed: int) -> AsyncIterator[Arena]:
    for name in HOSTS:
        stack.start_named(name)
    stub = LastingStub(stack.address)
    try:
        await asyncio.to_thread(stack.wait_ready)
        arena = Arena(stack, Random(seed), [stub])
        await arena.until(lambda: len(stack.load().workers) == 2)
        yield arena
    finally:
        await stub.close()


async def _suffer(arena: Arena, stack: NetworkStack, cut: Cut) -> list[float]:
    """Gives how long each stream stood still, if it did, once everything goes on as before."""
    await arena.until_busy(2, each=2)
    await asyncio.sleep(arena.random.uniform(*_PAUSE_S))
    arena.judge.take(Struck(time.monotonic(), str(cut)))
    _cut(stack, cut)
    await asyncio.sleep(cut.seconds)
    stack.network.heal()
    whole = arena.judge.num_whole + _CLIENTS
    await arena.until(lambda: arena.judge.num_whole >= whole, _RECOVERY_S)
    return [gap for gap in arena.judge.aftermaths[-1].gap_s.values() if gap > _STILL_S]


def _cut(stack: NetworkStack, cut: Cut) -> None:
    near, far = LINKS[cut.link]
    if cut.way == "unplugged":
        stack.network.unplug(far)
        return
    if cut.way in ("there", "both"):
        stack.network.cut(near, far)
    if cut.way in ("back", "both"):
        stack.network.cut(far, near)


def _figures(cut: Cut, gaps: Sequence[float]) -> dict[str, float]:
    median, longest = statistics.median(gaps or [0.0]), max(gaps, default=0.0)
    return {
        f"{cut} streams": len(gaps),
        f"{cut} gap_p50_s": round(median, 2),
        f"{cut} gap_max_s": round(longest, 2),
    }
