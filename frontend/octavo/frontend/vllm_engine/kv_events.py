"""Follows the KV events that a scheduler publishes by ZMQ, and writes them as messages of this protocol."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.frontend.errors import Broken, OutOfRange, Reason, Unavailable
from octavo.runtime.transport.sockets import connect_stranger

_END: Final = b"\xff" * 8
# Seconds that the scheduler may take for each batch of a replay.
_PATIENCE_S = 10.0
_MODULUS: Final = 1 << 64


class PublishedBatch(NamedTuple):
    """A batch as it was published: its number, and its msgpack."""

    number: int
    payload: bytes


class KVEventFeed:
    """Yields the batches of one scheduler without gaps; what is missing is asked for at `replay_endpoint`, if there is
    one."""

    def __init__(self, sub: zmq.asyncio.Socket, dealer: zmq.asyncio.Socket | None) -> None:
        self._sub = sub
        self._dealer = dealer
        # The number of the last batch that was yielded; 0: none was.
        self._last = 0

    async def missed(self, start: int) -> AsyncGenerator[PublishedBatch]:
        """Yields the batches from `start` on, 0 for all, that are kept.

        Raises `OutOfRange` if those behind `start` are no longer, and `Unavailable`.
        """
        self._last = start
        async for batch in self._replayed(start):
            if not self._follows(batch):
                raise OutOfRange(
                    Reason.KV_EVENTS_GONE,
                    f"KV events behind number {start} are not kept any more, the first is {batch.number}; subscribe"
                    " from 0, and forget what was held",
                )
            self._last = batch.number
            yield batch

    async def live(self) -> AsyncGenerator[PublishedBatch]:
        """Yields the batches behind those, as they come. Raises `Broken` if some are lost, and `Unavailable`."""
        while True:
            _, number, payload = await self._sub.recv_multipart()
            batch = PublishedBatch(int.from_bytes(number, "big"), payload)
            if not self._follows(batch):
                async with aclosing(self._replayed(self._last + 1)) as replayed:
                    async for missed in replayed:
                        if not self._follows(missed):
                            break
                        self._last = missed.number
                        yield missed
            if not self._follows(batch):
                raise Broken(
                    Reason.KV_EVENTS_LOST,
                    f"KV events {self._last + 1} to {batch.number - 1} are lost; subscribe from 0, and forget what was"
                    " held",
                )
            if batch.number > self._last:
                self._last = batch.number
                yield batch

    def _follows(self, batch: PublishedBatch) -> bool:
        """Tells whether nothing lies between the last batch and this one."""
        return self._last == 0 or batch.number <= self._last + 1

    async def _replayed(self, start: int) -> AsyncGenerator[PublishedBatch]:
        if self._dealer is None:
            return
        await self._dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    _, _, number, payload = await self._dealer.recv_multipart()
            except TimeoutError:
                raise Unavailable(
                    Reason.SCHEDULER_UNREACHABLE,
                    f"the scheduler has replayed no KV event for {_PATIENCE_S:g} s; try again",
                ) from None
            if number == _END:
                return
            yield PublishedBatch(int.from_bytes(number, "big"), payload)


@contextmanager
def feeding(endpoint: str, replay_endpoint: str) -> Iterator[KVEventFeed]:
    """Subscribes to a scheduler's KV events inside the block; an empty `replay_endpoint` is none."""
    with zmq.asyncio.Context() as context, connect_stranger(context, zmq.SUB, endpoint) as sub:
        sub.subscribe(b"")
        if not replay_endpoint:
            yield KVEventFeed(sub, None)
            return
        with connect_stranger(context, zmq.DEALER, replay_endpoint) as dealer:
            yield KVEventFeed(sub, dealer)


# -- messages ---------------------------------------------------------------------------------------------------------


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_NAMES: Final = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in (_Stored, _Removed, _Cleared)}


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    # Each an array or a map.
    events: list[Any]
    data_parallel_rank: int | None = None


def batch_message(batch: PublishedBatch) -> Any:
    """Returns a batch as a message. Raises `msgspec.ValidationError` for what no scheduler publishes."""
    read = msgspec.msgpack.decode(batch.payload, type=_Batch)
    return common.KvEventBatch(
        sequence_number=batch.number,
        timestamp=read.ts,
        events=[_event_message(_event(raw)) for raw in read.events],
        dp_rank=read.data_parallel_rank,
    )


def _event(raw: Any) -> _Stored | _Removed | _Cleared:
    if isinstance(raw, list):
        tag, *values = raw
        raw = {"type": tag, **dict(zip(_NAMES[tag], values, strict=False))}
    return msgspec.convert(raw, _Stored | _Removed | _Cleared)


def _event_message(event: _Stored | _Removed | _Cleared) -> Any:
    match event:
        case _Stored():
            return common.KvCacheEvent(stored=_stored_message(event))
        case _Removed(hashes, medium, group_idx):
            removed = common.KvBlocksRemoved(
                block_hashes=map(_signed, hashes),
                cache_level=0,
                tier=common.KV_CACHE_TIER_DEVICE,
                medium=medium,
                group_idx=group_idx,
            )
            return common.KvCacheEvent(removed=removed)
        case _Cleared():
            return common.KvCacheEvent(cleared=common.KvCacheCleared())


def _stored_message(event: _Stored) -> Any:
    size = event.block_size
    return common.KvBlocksStored(
        blocks=[
            common.KvBlock(
                block_hash=_signed(value),
                token_ids=event.token_ids[index * size :][:size],
                block_size=size,
                cache_level=0,
            )
            for index, value in enumerate(event.block_hashes)
        ],
        parent_block_hash=None if event.parent_block_hash is None else _signed(event.parent_block_hash),
        tier=common.KV_CACHE_TIER_DEVICE,
        medium=event.medium,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        lora_name=event.lora_name,
    )


def _signed(value: int) -> int:
    """Returns the number of equal bits that a signed field holds."""
    return value - _MODULUS if value >= _MODULUS >> 1 else value
