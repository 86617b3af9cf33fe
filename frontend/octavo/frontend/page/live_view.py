"""Feeds the live view: the scheduler's WatchBlocks stream as JSON, one snapshot a second, shared by all viewers."""

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

import grpc
import msgspec

from octavo.frontend.api.explanations import unreachable
from octavo.frontend.errors import Overloaded, Reason, Unavailable
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

_INTERVAL_MS: Final = 1000
# Seconds after which a scheduler that sends nothing is taken for gone.
_SILENCE_S: Final = 10.0
# A pool of a million blocks is a snapshot of a few MB.
_OPTIONS: Final = [("grpc.max_receive_message_length", 64 << 20)]
_encode: Final = msgspec.json.Encoder().encode


async def snapshots(admin_address: str, own: Callable[[], Mapping[str, Any]] = dict[str, Any]) -> AsyncGenerator[bytes]:
    """Yields snapshots as JSON objects until closed, each with the fields that `own` returns at its time.

    Raises `Unavailable` when the scheduler does not answer.
    """
    async with grpc.aio.insecure_channel(admin_address, options=_OPTIONS) as channel:
        call = services.AdminServiceStub(channel).WatchBlocks(pb.WatchBlocksRequest(interval_ms=_INTERVAL_MS))
        while True:
            yield _encode({**to_snapshot(await _read(call)), **own()})


async def _read(call: Any) -> pb.WatchBlocksResponse:
    try:
        async with asyncio.timeout(_SILENCE_S):
            answer = await call.read()
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise unreachable() from error
    if not isinstance(answer, pb.WatchBlocksResponse):
        # The end of the stream.
        raise unreachable()
    return answer


def to_snapshot(answer: pb.WatchBlocksResponse) -> dict[str, Any]:
    """Returns a snapshot as the page's script reads it."""
    load = answer.load
    known = {worker.id: worker for worker in load.workers}
    return {
        "load": {
            "waiting": load.waiting,
            "running": load.running,
            "swapped": load.swapped,
            "preemptions": load.preemptions,
            "moved": sum(worker.moved_in for worker in load.workers),
            "frontends": load.frontends,
            "workers": [worker.id for worker in load.workers],
        },
        "workers": [_worker(blocks, known.get(blocks.worker_id)) for blocks in answer.workers],
        "requests": [status_of(status) for status in answer.requests],
    }


def _worker(blocks: pb.WorkerBlocks, worker: pb.Worker | None) -> dict[str, Any]:
    return {
        "id": blocks.worker_id,
        "device": worker.device if worker else "",
        "token_rate": worker.token_rate if worker else 0.0,
        "tokens_sampled": worker.tokens_sampled if worker else 0,
        "block_size": worker.block_size if worker else 0,
        "moved_in": worker.moved_in if worker else 0,
        "tiers": [_tier(tier) for tier in worker.tiers] if worker else [],
        "states": b64encode(blocks.states).decode(),
        "cpu_states": b64encode(blocks.cpu_states).decode(),
        "owners": [
            {
                "request_id": owner.request_id,
                "prefix_name": owner.prefix_name,
                "block_ids": list(owner.block_ids),
                "cpu_block_ids": list(owner.cpu_block_ids),
            }
            for owner in blocks.owners
        ],
    }


def _tier(tier: pb.CacheTier) -> dict[str, Any]:
    return {
        "tier": _tier_name(tier.tier),
        "blocks": tier.blocks,
        "capacity": tier.capacity,
        "hits": tier.hits,
        "hit_tokens": tier.hit_tokens,
        "evicted_blocks": tier.evicted_blocks,
        "missed_blocks": tier.missed_blocks,
        "moved": {_tier_name(move.to): move.blocks for move in tier.moves},
        "place": tier.place,
    }


def _tier_name(tier: pb.Tier) -> str:
    return pb.Tier.Name(tier).removeprefix("TIER_").lower()


def status_of(status: pb.RequestStatus) -> dict[str, Any]:
    """Returns a request as the page's script reads it."""
    return {
        "request_id": status.request_id,
        "frontend_id": status.frontend_id,
        "state": pb.RequestState.Name(status.state).removeprefix("REQUEST_STATE_").lower(),
        "tenant": status.tenant,
        "worker_id": status.worker_id,
        "moves_to": status.moves_to,
        "prompt_tokens": status.prompt_tokens,
        "computed_tokens": status.computed_tokens,
        "output_tokens": status.output_tokens,
        "sequences": status.sequences,
        "preemptions": status.preemptions,
        "swaps": status.swaps,
        "age_s": status.age.ToNanoseconds() / 1e9,
    }


MAX_VIEWERS: Final = 16
# Seconds until a viewer notices that the server is about to stop; connections then get a second to end.
_LOOK_S: Final = 0.2

_Box = asyncio.Queue[bytes | Exception]


class LiveView:
    """Gives every viewer the newest snapshot of `source`, which is opened for the first and closed after the last."""

    def __init__(self, source: Callable[[], AsyncGenerator[bytes]], is_stopping: Callable[[], bool]) -> None:
        self._source = source
        self._is_stopping = is_stopping
        self._boxes: set[_Box] = set()
        self._pump: asyncio.Task[None] | None = None
        # The snapshot that a newcomer gets at once.
        self._newest: bytes | None = None

    async def watch(self) -> AsyncGenerator[bytes]:
        """Yields snapshots until closed; a slow viewer misses some.

        Raises `Overloaded` where `MAX_VIEWERS` watch already, `Unavailable` when the server stops, and what the source
        raises.
        """
        if len(self._boxes) >= MAX_VIEWERS:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS, f"{MAX_VIEWERS} viewers watch already; close one of them", max=MAX_VIEWERS
            )
        box = self._enter()
        try:
            while True:
                yield await self._next(box)
        finally:
            self._leave(box)

    def _enter(self) -> _Box:
        box = _Box(maxsize=1)
        self._boxes.add(box)
        if self._pump is None or self._pump.done():
            self._pump, self._newest = asyncio.create_task(self._run()), None
        if self._newest is not None:
            box.put_nowait(self._newest)
        return box

    def _leave(self, box: _Box) -> None:
        self._boxes.discard(box)
        if not self._boxes and self._pump:
            self._pump.cancel()
            self._pump = None

    async def _next(self, box: _Box) -> bytes:
        while not self._is_stopping():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    found = await box.get()
                if isinstance(found, Exception):
                    raise found
                return found
        raise Unavailable(Reason.DRAINING, "this server is about to stop; watch another one")

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._source()) as snapshots:
                async for self._newest in snapshots:
                    self._put(self._newest)
        except Exception as error:
            self._put(error)

    def _put(self, found: bytes | Exception) -> None:
        for box in self._boxes:
            if box.full():
                box.get_nowait()
            box.put_nowait(found)
