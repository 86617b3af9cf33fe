"""Runs a campaign in which links between hosts fail for a while, and all streams go on."""

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, Self

import grpc

from octavo.chaos.report import CampaignReport, in_logs, shortened
from octavo.chaos.system import SystemUnderLoad
from octavo.client.async_client import AsyncStream
from octavo.client.channels import open_async_channel
from octavo.client.errors import OctavoError
from octavo.client.events import Event
from octavo.client.requests import StreamedRequest
from octavo.client.retries import Recovery, RetryPolicy
from octavo.runtime.transport.curve_keys import write_keys
from octavo.testbed.history import Struck
from octavo.testbed.netns import Network
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

CLIENT: Final = "client"
HOSTS: Final = ("scheduler", "frontend", "worker-0", "worker-1")
_FRONTENDS_PORT, _WORKERS_PORT, _GRPC_PORT = 7001, 7002, 50051


@dataclass
class NetworkStack(Stack):
    """Runs the process of a name on the host of that name."""

    network: Network = field(kw_only=True)

    @property
    def address(self) -> str:
        return self.address_of("frontend")

    def address_of(self, frontend: str) -> str:
        return f"{self.network.address(frontend)}:{_GRPC_PORT}"

    def on(self, name: str) -> Sequence[str]:
        return self.network.on(name)


@contextmanager
def network_stack(model: Path, directory: Path, environment: dict[str, str]) -> Iterator[NetworkStack]:
    """Makes a stack in which nothing is started yet."""
    network = Network(CLIENT, HOSTS)
    keys = directory.parent / "keys"
    write_keys(keys)
    scheduler = network.address("scheduler")
    hosted = {
        "OCTAVO_FRONTEND_ENDPOINT": f"tcp://{scheduler}:{_FRONTENDS_PORT}",
        "OCTAVO_WORKER_ENDPOINT": f"tcp://{scheduler}:{_WORKERS_PORT}",
        "OCTAVO_CURVE_KEYS": str(keys),
    }
    with NetworkStack(model, directory, {**hosted, **environment}, network=network) as stack:
        yield stack


_DETACH_GRACE_S = 30


@dataclass
class _Remembered(StreamedRequest):
    """Keeps the message of the last event."""

    message: pb.GenerateResponse = field(default_factory=pb.GenerateResponse, init=False)

    def accept(self, message: pb.GenerateResponse | pb.AttachResponse) -> Event | None:
        event = super().accept(message)
        if event is not None:
            self.message = message.event if isinstance(message, pb.AttachResponse) else message
        return event


class LastingCall(AsyncIterator[pb.GenerateResponse]):
    """Looks like a call of the generated stub, and goes on with a stream whose connection was lost, as the client
    library does."""

    def __init__(self, stub: services.GenerationServiceStub, request: pb.GenerateRequest, timeout: float) -> None:
        recovery = Recovery(RetryPolicy(), time.monotonic, time.monotonic() + timeout, attachable=True)
        self._request = _Remembered(request, recovery, own_id=False)
        self._stream = AsyncStream(stub, self._request, ())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Raises what the generated stub raises."""
        try:
            await anext(self._stream)
        except OctavoError as error:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(error.code, nothing, nothing, str(error), None) from error
        return self._request.message

    def cancel(self) -> None:
        """Ends the request with its detach grace, as after a lost connection."""
        self._stream._call.cancel()


class LastingStub:
    """Implements as much of the generated stub as the clients of campaigns use."""

    def __init__(self, address: str) -> None:
        self._channel = open_async_channel(address)
        self._stub = services.GenerationServiceStub(self._channel)

    def Generate(self, request: pb.GenerateRequest, timeout: float) -> LastingCall:
        lasting = pb.GenerateRequest()
        lasting.CopyFrom(request)
        lasting.scheduling.detach_grace.FromSeconds(_DETACH_GRACE_S)
        return LastingCall(self._stub, lasting, timeout)

    async def close(self) -> None:
        await self._channel.close(None)


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
    """Describes what is lost for `seconds`: what the first end of a link says, what the second says, both, or all that
    the second says and hears."""

    link: str
    way: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.link}:{self.way}:{self.seconds:g}"

    @property
    def longest_gap_s(self) -> float:
        """Returns the seconds for which a stream may stand still: two seconds more than the cut; or the time that it
        takes to move to another worker, or a client to find out that its connection is lost."""
        return max(self.seconds + 2.0, 10.0 if self.link == "client/frontend" else 5.0)


ALL: Final = [Cut(*each) for each in itertools.product(LINKS, WAYS, (1.0, 10.0))]


def named(name: str) -> Cut:
    """Raises `ValueError` if there is no such cut."""
    link, way, seconds = name.split(":") if name.count(":") == 2 else ("", "", "")
    if link not in LINKS or way not in WAYS:
        raise ValueError(f"{name!r} is no cut; write LINK:WAY:SECONDS, with {', '.join(LINKS)} and {', '.join(WAYS)}")
    return Cut(link, way, float(seconds))


def run(
    cuts: Sequence[Cut], seed: int = 0, tell: Callable[[str], None] = lambda line: None, patience_s: float = 0.0
) -> CampaignReport:
    """Makes one cut after the other, under load. A stream may stand still for `patience_s` seconds more than on a
    quiet machine. It runs only in a process started by `octavo.testbed.netns.in_own_network`."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        model = Path(parent) / "byte-model"
        write_byte_model(model)
        with network_stack(model, Path(parent) / "run", _ENVIRONMENT) as stack:
            return asyncio.run(_run(stack, cuts, seed, tell, patience_s))


async def _run(
    stack: NetworkStack, cuts: Sequence[Cut], seed: int, tell: Callable[[str], None], patience_s: float
) -> CampaignReport:
    async with _arena(stack, seed) as system:
        # Most streams are still going on when the link comes back.
        await system.learn(_QUESTIONS, _EXTRA_TOKENS + int(max(cut.seconds for cut in cuts) / _STEP_S))
        began, figures, late = time.monotonic(), dict[str, float](), list[str]()
        async with system.crowd(_CLIENTS):
            for cut in cuts:
                gaps = await _suffer(system, stack, cut)
                figures |= _figures(cut, gaps)
                longest_s = cut.longest_gap_s + patience_s
                late += [f"{cut}: a stream stood still for {gap:.1f} s" for gap in gaps if gap > longest_s]
                tell(f"{cut}: {len(gaps)} streams, the longest gap {max(gaps, default=0.0):.2f} s")
        seconds = round(time.monotonic() - began, 1)
        await system.rest()
        faults = shortened([*system.judge.faults, *in_logs(stack), *late])
        return CampaignReport("cuts", len(cuts), seconds, system.judge.num_whole, system.kinds, figures, faults)


@contextlib.asynccontextmanager
async def _arena(stack: NetworkStack, seed: int) -> AsyncIterator[SystemUnderLoad]:
    for name in HOSTS:
        stack.start_named(name)
    stub = LastingStub(stack.address)
    try:
        await asyncio.to_thread(stack.wait_ready)
        system = SystemUnderLoad(stack, Random(seed), [stub])
        await system.until(lambda: len(stack.load().workers) == 2)
        yield system
    finally:
        await stub.close()


async def _suffer(system: SystemUnderLoad, stack: NetworkStack, cut: Cut) -> list[float]:
    """Gives how long each stream stood still, if it did, once everything goes on as before."""
    await system.until_busy(2, each=2)
    await asyncio.sleep(system.random.uniform(*_PAUSE_S))
    system.judge.take(Struck(time.monotonic(), str(cut)))
    _cut(stack, cut)
    await asyncio.sleep(cut.seconds)
    stack.network.heal()
    whole = system.judge.num_whole + _CLIENTS
    await system.until(lambda: system.judge.num_whole >= whole, _RECOVERY_S)
    return [gap for gap in system.judge.aftermaths[-1].gap_s.values() if gap > _STILL_S]


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
