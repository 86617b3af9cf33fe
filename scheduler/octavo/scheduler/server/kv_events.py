"""KV events: what the replicas of this cell hold, published by ZMQ for routers, in the format of vLLM.

A batch has three frames: the topic, its number (8 bytes, big-endian), and in msgpack its time in seconds, its events
and the data-parallel rank, 0 always. An event is an array, or a map as vLLM writes since 0.24. A subscriber that has
missed batches asks for them at a second socket, as far as they are kept: `[identity, "", number]` is answered with
`[identity, "", topic, number, batch]` for each from that on, and at last with the number -1 and no batch.

Numbers grow from one life of the scheduler to the next, as clocks do: to Dynamo's indexer a batch whose number is not
above all before is an old one, and llm-d sees by a gap as well as by a fall that it must begin anew.
"""

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.runtime.options.option import Option, Whole
from octavo.runtime.telemetry.numbers import Tally, counter
from octavo.runtime.transport.endpoints import EndpointError, check_endpoint, check_unguarded, claimed, is_loopback
from octavo.runtime.transport.sockets import bind_router, make_publisher
from octavo.scheduler.kv.census import AllBlocksCleared, BlockCensus, BlockRemoved, BlockStored, KVEvent

_log = logging.getLogger(__name__)

_NUMBER_BYTES = 8
# More than any scheduler publishes.
_NUMBERS_PER_S = 1_000_000
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
# A cell is one place to a router, whatever its replicas.
_RANK = 0
# Where a worker computes, on whatever device.
_MEDIUM = "GPU"
# Batches that a replay sends before the scheduler may take its turn; seconds between looks at one who does not read.
_REPLAYED_AT_ONCE = 64
_LOOK_S = 0.01
# Seconds after which a replay to one who does not read is given up.
_REPLAY_PATIENCE_S = 5.0
# Names of an event's values, in their order; maps leave those out that are optional and None.
_OPTIONAL: Final = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_STORED: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *_OPTIONAL,
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")


class EventForm(enum.StrEnum):
    """Says how an event is written: its values after its name, or each value by its name, as vLLM does since 0.24."""

    ARRAY = "array"
    MAP = "map"


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Says where KV events are published; without an endpoint they are not."""

    kv_events_endpoint: Annotated[
        str,
        Option(
            "--kv-events-endpoint",
            "Publish KV events for routers, in vLLM's format: tcp://*:5557, loopback and ipc:// are listened at,"
            " any other tcp://host:port is connected to. Default: nowhere.",
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str,
        Option(
            "--kv-events-replay-endpoint",
            "Where routers ask for KV events that they have missed, such as tcp://*:5558. Default: nowhere.",
        ),
    ] = ""
    kv_events_topic: Annotated[
        str,
        Option("--kv-events-topic", "Topic of KV events; llm-d wants kv@ADDRESS:PORT@MODEL, of the endpoint it knows."),
    ] = ""
    kv_events_form: Annotated[
        EventForm,
        Option(
            "--kv-events-form",
            "How a KV event is written: as an array, which all routers read, or as a map, as vLLM does since 0.24.",
        ),
    ] = EventForm.ARRAY
    # As many as vLLM keeps.
    kv_events_buffer: Annotated[
        int, Option("--kv-events-buffer", "Batches of KV events that are kept for a replay.", Whole(1, 1_000_000))
    ] = 10_000
    insecure_kv_events: Annotated[
        bool,
        Option(
            "--insecure-kv-events",
            "Allow KV events beyond this machine: they hold prompts as token ids, for whoever asks, and unencrypted.",
        ),
    ] = False
    # Seconds in which changes gather. A router learns soon enough, for a prompt's blocks are there long before its
    # answer, and the next request after that, is; and a sequence's blocks are told together.
    kv_events_interval_s: float = 0.5


# -- the format -------------------------------------------------------------------------------------------------------


def encode_batch(events: list[KVEvent], seconds: float, form: EventForm) -> bytes:
    """Encodes a batch of `seconds` since 1970."""
    write = _as_array if form is EventForm.ARRAY else _as_map
    return msgspec.msgpack.encode([seconds, [write(*_described(event)) for event in events], _RANK])


def _described(event: KVEvent) -> tuple[str, tuple[str, ...], list[Any]]:
    """Returns an event's name, the names of its values, and the values."""
    match event:
        case BlockStored(kv_group, window, adapter, block_size, parent, hashes, token_ids):
            # What besides tokens makes a block differ from others: there is no number for adapters.
            extra_keys = [[adapter] if adapter else None] * len(hashes)
            name = adapter or None
            values = [hashes, parent, token_ids, block_size, None, _MEDIUM, name, extra_keys, kv_group]
            values += ["sliding_window", window] if window else ["full_attention", None]
            return "BlockStored", _STORED, values
        case BlockRemoved(kv_group, hashes):
            return "BlockRemoved", _REMOVED, [hashes, _MEDIUM, kv_group]
        case AllBlocksCleared():
            return "AllBlocksCleared", (), []


def _as_array(tag: str, names: tuple[str, ...], values: list[Any]) -> list[Any]:
    return [tag, *values]


def _as_map(tag: str, names: tuple[str, ...], values: list[Any]) -> dict[str, Any]:
    given = zip(names, values, strict=True)
    return {"type": tag, **{name: value for name, value in given if value is not None or name not in _OPTIONAL}}


# -- the stream -------------------------------------------------------------------------------------------------------


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


class KVEventStream(Collector):
    """Numbers the batches that a census yields, from `first` on, hands them to `send` and keeps the last `num_kept`.
    Between two batches pass `interval_s` seconds. `clock` is the one on the wall, in seconds."""

    def __init__(
        self,
        census: BlockCensus,
        send: Callable[[bytes, bytes], None],
        form: EventForm = EventForm.ARRAY,
        num_kept: int = 10_000,
        first: int = 0,
        interval_s: float = 0.0,
        clock: Callable[[], float] = _wall_clock,
    ) -> None:
        self._census = census
        self._send = send
        self._form = form
        self._clock = clock
        self._interval_s = interval_s
        self._next_at = 0.0
        self._kept: deque[bytes] = deque(maxlen=num_kept)
        self.next_number = first
        self._num_published = 0
        self._blocks = Tally("stored", "removed")
        self._replayed = self._missed = 0

    def publish(self) -> None:
        """Sends what has changed since the last batch, if it is time for another and anything has."""
        if (now := time.monotonic()) < self._next_at or not (events := self._census.take()):
            return
        self._next_at = now + self._interval_s
        batch = encode_batch(events, self._clock(), self._form)
        self._kept.append(batch)
        self._send(_number(self.next_number), batch)
        self.next_number += 1
        self._num_published += 1
        for event in events:
            if not isinstance(event, AllBlocksCleared):
                self._blocks.add("stored" if isinstance(event, BlockStored) else "removed", len(event.hashes))

    def replay(self, start: int) -> Iterator[tuple[bytes, bytes]]:
        """Yields number and batch of all from `start` on that have been sent so far, and are kept when their turn
        comes."""
        end = self.next_number
        first = max(start, self._oldest)
        # One that begins at 0 asks for all that there is.
        self._missed += max(0, min(first, end) - start) if start else 0
        for number in range(first, end):
            if (index := number - self._oldest) >= 0:
                self._replayed += 1
                yield _number(number), self._kept[index]

    @property
    def num_blocks_told(self) -> int:
        """Counts the blocks that were told as stored or removed."""
        return round(self._blocks.total)

    @property
    def _oldest(self) -> int:
        return self.next_number - len(self._kept)

    def collect(self) -> Iterator[Metric]:
        yield counter("octavo_kv_event_batches", "Batches of KV events published.", self._num_published)
        yield self._blocks.family("octavo_kv_event_blocks", "Blocks told as stored or removed by them.", "change")
        yield counter("octavo_kv_event_batches_replayed", "Those that subscribers asked for again.", self._replayed)
        text = "Those asked for again that were kept no longer."
        yield counter("octavo_kv_event_batches_missed", text, self._missed)


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


class Replays:
    """Answers those who ask at a ROUTER socket for batches that they have missed, one after the other."""

    def __init__(self, stream: KVEventStream, socket: zmq.asyncio.Socket, topic: bytes) -> None:
        self._stream = stream
        self._socket = socket
        self._topic = topic
        self._num_malformed = 0

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await self._answer(await self._socket.recv_multipart())

    async def _answer(self, request: list[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != _NUMBER_BYTES:
            self._num_malformed += 1
            # The first, and then ever fewer of them.
            if self._num_malformed.bit_count() == 1:
                _log.warning("%d requests for KV events were malformed", self._num_malformed)
            return
        identity, _, start = request
        replay = ((self._topic, *each) for each in self._stream.replay(int.from_bytes(start, "big")))
        waits = round(_REPLAY_PATIENCE_S / _LOOK_S)
        for count, frames in enumerate(chain(replay, [(b"", _END, b"")]), 1):
            while (left := await self._sent([identity, b"", *frames])) is None and waits:
                waits -= 1
                await asyncio.sleep(_LOOK_S)
            if not left:
                return
            if count % _REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _sent(self, frames: list[bytes]) -> bool | None:
        """Sends a message and returns whether it left: None if its reader has to read first, False if it has gone."""
        try:
            await self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        return True


# -- sockets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Holds what publishes KV events: the census for all replicas' memories, the stream for every turn's end, and who
    serves replays; nothing where they are not published."""

    census: BlockCensus | None = None
    stream: KVEventStream | None = None
    replays: Replays | None = None


@contextmanager
def kv_events(config: KVEventsConfig) -> Iterator[Published]:
    """Opens the sockets that `config` asks for. Raises `EndpointError` and `zmq.ZMQError`."""
    endpoint, replay_endpoint = config.kv_events_endpoint, config.kv_events_replay_endpoint
    if not endpoint:
        if replay_endpoint:
            raise EndpointError("--kv-events-replay-endpoint has nothing to replay without --kv-events-endpoint")
        yield Published()
        return
    with ExitStack() as held:
        for each in filter(None, (endpoint, replay_endpoint)):
            _check(each, insecure=config.insecure_kv_events)
        if replay_endpoint and not _listens(replay_endpoint):
            raise EndpointError(f"--kv-events-replay-endpoint {replay_endpoint} is elsewhere; use tcp://*:port")
        for each in filter(_listens, (endpoint, replay_endpoint)):
            held.enter_context(claimed(each))
        context = held.enter_context(zmq.Context())
        publisher = held.enter_context(make_publisher(context, endpoint, binds=_listens(endpoint)))
        topic = config.kv_events_topic.encode()

        def send(number: bytes, batch: bytes) -> None:
            publisher.send_multipart([topic, number, batch], zmq.NOBLOCK)

        census, replays = BlockCensus(), None
        first = round(_wall_clock() * _NUMBERS_PER_S)
        num_kept = config.kv_events_buffer if replay_endpoint else 0
        stream = KVEventStream(census, send, config.kv_events_form, num_kept, first, config.kv_events_interval_s)
        if replay_endpoint:
            waited = zmq.asyncio.Context.shadow(context)
            router = held.enter_context(bind_router(waited, replay_endpoint, is_foreign=True))
            replays = Replays(stream, router, topic)
        _log.info("KV events %s %s", "at" if _listens(endpoint) else "to", endpoint)
        yield Published(census, stream, replays)


def _check(endpoint: str, *, insecure: bool) -> None:
    """Refuses what is no address, and one that others reach unless that is wanted. Raises `EndpointError`."""
    check_endpoint(endpoint, insecure_tcp=False, has_keys=True)
    if endpoint.startswith("tcp://"):
        check_unguarded(endpoint.removeprefix("tcp://"), "KV events", "--insecure-kv-events", allowed=insecure)


def _listens(endpoint: str) -> bool:
    """Tells whether an endpoint is to be listened at: it is on this machine, or stands for all its addresses."""
    host = urlsplit(endpoint).hostname or ""
    return endpoint.startswith("ipc://") or host in ("*", "::", "0.0.0.0") or is_loopback(host)
