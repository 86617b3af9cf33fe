"""KV events as subscribers get them: the frames, what is replayed, and what slow and strange ones cost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo.runtime.transport.endpoints import EndpointError
from octavo.scheduler.kv.census import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from octavo.scheduler.server.kv_events import (
    EventForm,
    KVEventsConfig,
    KVEventStream,
    Published,
    encode_batch,
    kv_events,
)
from octavo.testing.fakes.cached_blocks import CachedBlocks
from octavo.testing.oracles import vllm_kv_events as vllm

TOPIC = b"kv@10.0.0.1:8000@model"
FIRST = 5000
# What the replica of a stream holds.
REPLICAS: WeakKeyDictionary[KVEventStream, CachedBlocks] = WeakKeyDictionary()
_END = b"\xff" * 8
_PATIENCE_S = 60.0
STORED = BlockStored(0, 0, "", 2, None, [2**64 - 1, 7], [1, 2, 3, 4])
CHILD = BlockStored(1, 4096, "adapter", 2, 7, [9], [5, 6])
REMOVED = BlockRemoved(1, [9])
EVENTS: list[KVEvent] = [AllBlocksCleared(), STORED, CHILD, REMOVED]


# -- the format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", EventForm)
def test_a_batch_is_to_the_byte_what_vllm_publishes(form: EventForm) -> None:
    if form is EventForm.ARRAY:
        kinds = vllm.BlockStored, vllm.BlockRemoved, vllm.AllBlocksCleared
    else:
        kinds = vllm.BlockStoredMap, vllm.BlockRemovedMap, vllm.AllBlocksClearedMap
    stored, removed, cleared = kinds
    batch = vllm.KVEventBatch(
        ts=12.5,
        events=[
            cleared(),
            stored(
                block_hashes=[2**64 - 1, 7],
                parent_block_hash=None,
                token_ids=[1, 2, 3, 4],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[None, None],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            ),
            stored(
                block_hashes=[9],
                parent_block_hash=7,
                token_ids=[5, 6],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name="adapter",
                extra_keys=[("adapter",)],
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=4096,
            ),
            removed(block_hashes=[9], medium="GPU", group_idx=1),
        ],
        data_parallel_rank=0,
    )
    encoded = encode_batch(EVENTS, 12.5, form)
    assert encoded == msgspec.msgpack.encode(batch)
    assert vllm.decode(encoded, as_map=form is EventForm.MAP).events == batch.events


def test_an_event_is_an_array_in_this_order() -> None:
    assert msgspec.msgpack.decode(encode_batch(EVENTS, 1.0, EventForm.ARRAY)) == [
        1.0,
        [
            ["AllBlocksCleared"],
            [
                *("BlockStored", [2**64 - 1, 7], None, [1, 2, 3, 4], 2, None, "GPU", None),
                *([None, None], 0, "full_attention", None),
            ],
            ["BlockStored", [9], 7, [5, 6], 2, None, "GPU", "adapter", [["adapter"]], 1, "sliding_window", 4096],
            ["BlockRemoved", [9], "GPU", 1],
        ],
        0,
    ]


def test_an_event_is_a_map_with_its_type_first() -> None:
    events = msgspec.msgpack.decode(encode_batch(EVENTS, 1.0, EventForm.MAP))[1]
    assert [next(iter(event.items())) for event in events] == [
        ("type", "AllBlocksCleared"),
        ("type", "BlockStored"),
        ("type", "BlockStored"),
        ("type", "BlockRemoved"),
    ]
    assert events[3] == {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 1}


# -- sockets ----------------------------------------------------------------------------------------------------------


class Subscriber:
    """A router beside a publisher."""

    def __init__(self, context: zmq.asyncio.Context, config: KVEventsConfig) -> None:
        self.sub = context.socket(zmq.SUB)
        self.sub.connect(config.kv_events_endpoint)
        self.sub.subscribe(b"")
        self.dealer = context.socket(zmq.DEALER)
        if config.kv_events_replay_endpoint:
            self.dealer.connect(config.kv_events_replay_endpoint)

    async def next(self) -> tuple[bytes, int, vllm.KVEventBatch]:
        async with asyncio.timeout(_PATIENCE_S):
            topic, number, payload = await self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), vllm.decode(payload)

    async def replay(self, start: int) -> list[tuple[int, bytes]]:
        """All batches from `start` on, as they are replayed."""
        await self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                delimiter, topic, number, payload = await self.dealer.recv_multipart()
                assert delimiter == b""
                if number == _END:
                    assert topic == payload == b""
                    return batches
                assert topic == TOPIC
                batches.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.sub.close(linger=0)
        self.dealer.close(linger=0)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        kv_events_endpoint=f"ipc://{tmp_path}/events.sock",
        kv_events_replay_endpoint=f"ipc://{tmp_path}/replay.sock",
        kv_events_topic=TOPIC.decode(),
        kv_events_interval_s=0.0,
    )


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


@asynccontextmanager
async def publishing(config: KVEventsConfig) -> AsyncIterator[Published]:
    with kv_events(config) as published:
        assert published.census
        assert published.stream
        REPLICAS[published.stream] = CachedBlocks(published.census)
        running = asyncio.create_task(published.replays.run()) if published.replays else None
        published.stream.next_number = FIRST
        yield published
        if running is not None:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running


def publish(published: Published, *names: int) -> None:
    """A batch for each of these blocks, which are all their sequence's first, of two tokens."""
    assert published.stream
    for name in names:
        REPLICAS[published.stream].hold([name, name])
        published.stream.publish()


async def until_subscribed(published: Published, subscriber: Subscriber) -> int:
    """Publishes until a batch arrives; returns the number of the last that was published."""
    assert published.stream
    for name in range(1000, 100_000):
        publish(published, name)
        if await subscriber.sub.poll(20):
            while int.from_bytes((await subscriber.sub.recv_multipart())[1], "big") < published.stream.next_number - 1:
                pass
            return published.stream.next_number - 1
    raise AssertionError("nothing arrives")


async def test_batches_come_in_three_frames_and_are_numbered_without_gaps(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    async with publishing(config) as published:
        subscriber = Subscriber(context, config)
        last = await until_subscribed(published, subscriber)
        publish(published, 1, 2)
        for number, name in ((last + 1, 1), (last + 2, 2)):
            topic, told, batch = await subscriber.next()
            assert (topic, told) == (TOPIC, number)
            assert [event.token_ids for event in batch.events] == [[name, name]]
            assert batch.data_parallel_rank == 0
        subscriber.close()


async def test_the_first_batch_clears_all_and_is_numbered_above_those_of_schedulers_before(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    numbers = []
    for _ in range(2):
        with kv_events(config) as published:
            assert published.census
            assert published.stream
            numbers.append(published.stream.next_number)
    assert 1.7e15 < numbers[0] < numbers[1] < 2**53
    async with publishing(config) as published:
        publish(published, 5)
        subscriber = Subscriber(context, config)
        ((number, payload),) = await subscriber.replay(0)
        assert number == FIRST
        assert [type(event) for event in vllm.decode(payload).events] == [vllm.AllBlocksCleared, vllm.BlockStored]
        subscriber.close()


async def test_a_turn_in_which_nothing_changes_publishes_nothing(config: KVEventsConfig) -> None:
    async with publishing(config) as published:
        assert published.stream
        publish(published, 1)
        published.stream.publish()
        assert published.stream.next_number == FIRST + 1


async def test_a_gap_is_mended_by_a_replay(config: KVEventsConfig, context: zmq.asyncio.Context) -> None:
    async with publishing(config) as published:
        publish(published, *range(1, 200))
        subscriber = Subscriber(context, config)
        replayed = await subscriber.replay(FIRST + 150)
        assert [number for number, _ in replayed] == list(range(FIRST + 150, FIRST + 199))
        assert [vllm.decode(payload).events[0].token_ids for _, payload in replayed] == [
            [name, name] for name in range(151, 200)
        ]
        assert await subscriber.replay(FIRST + 199) == []
        assert await subscriber.replay(2**64 - 1) == []
        subscriber.close()


async def test_only_so_many_batches_are_kept_and_what_is_gone_is_counted(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    async with publishing(replace(config, kv_events_buffer=3)) as published:
        assert published.stream
        publish(published, *range(1, 11))
        subscriber = Subscriber(context, config)
        assert [number for number, _ in await subscriber.replay(FIRST + 5)] == [FIRST + 7, FIRST + 8, FIRST + 9]
        assert len(await subscriber.replay(0)) == 3
        assert samples(published.stream) == {
            "octavo_kv_event_batches_total": 10,
            "octavo_kv_event_blocks_total{'change': 'stored'}": 10,
            "octavo_kv_event_blocks_total{'change': 'removed'}": 0,
            "octavo_kv_event_batches_replayed_total": 6,
            "octavo_kv_event_batches_missed_total": 2,
        }
        subscriber.close()


def samples(stream: KVEventStream) -> dict[str, float]:
    return {
        sample.name + (str(sample.labels) if sample.labels else ""): sample.value
        for family in stream.collect()
        for sample in family.samples
    }


async def test_nothing_is_kept_where_nobody_can_ask_for_it(config: KVEventsConfig) -> None:
    async with publishing(replace(config, kv_events_replay_endpoint="")) as published:
        assert published.stream
        publish(published, 1, 2)
        assert published.stream.next_number == FIRST + 2
        assert list(published.stream.replay(0)) == []


async def test_more_batches_are_replayed_than_a_socket_queues(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    async with publishing(config) as published:
        publish(published, *range(1, 9001))
        subscriber = Subscriber(context, config)
        assert [number for number, _ in await subscriber.replay(0)] == list(range(FIRST, FIRST + 9000))
        subscriber.close()


async def test_strange_requests_are_not_answered_and_those_after_them_are(
    config: KVEventsConfig, context: zmq.asyncio.Context, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(config) as published:
        publish(published, 1)
        subscriber = Subscriber(context, config)
        for frames in ([b"what"], [b"", b"short"], [b"", bytes(8), b"more"], [b"x", bytes(8)]):
            await subscriber.dealer.send_multipart(frames)
        assert [number for number, _ in await subscriber.replay(0)] == [FIRST]
        assert "1 requests for KV events were malformed" in caplog.text
        subscriber.close()


async def test_one_who_asks_and_does_not_read_keeps_nobody_waiting_for_long(
    config: KVEventsConfig, context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.scheduler.server.kv_events._REPLAY_PATIENCE_S", 0.1)
    async with publishing(config) as published:
        publish(published, *range(1, 9001))
        silent = context.socket(zmq.DEALER)
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.connect(config.kv_events_replay_endpoint)
        for _ in range(20):
            await silent.send_multipart([b"", bytes(8)])
        subscriber = Subscriber(context, config)
        assert len(await subscriber.replay(FIRST + 8000)) == 1000
        subscriber.close()
        silent.close(linger=0)


async def test_one_who_has_gone_before_the_answer_harms_nobody(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    async with publishing(config) as published:
        publish(published, *range(1, 5001))
        gone = Subscriber(context, config)
        await gone.dealer.send_multipart([b"", bytes(8)])
        await gone.dealer.recv_multipart()
        gone.close()
        subscriber = Subscriber(context, config)
        assert len(await subscriber.replay(0)) == 5000
        subscriber.close()


async def test_a_subscriber_that_does_not_read_is_not_waited_for_and_sees_the_gap(
    config: KVEventsConfig, context: zmq.asyncio.Context
) -> None:
    async with publishing(config) as published:
        assert published.stream
        subscriber = Subscriber(context, config)
        subscriber.sub.setsockopt(zmq.RCVHWM, 1)
        slow = context.socket(zmq.SUB)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.connect(config.kv_events_endpoint)
        slow.subscribe(b"")
        last = await until_subscribed(published, subscriber)
        while not await slow.poll(20):
            publish(published, last + 500_000)
            last += 1
        # More than what both ends queue, and the kernel between them.
        publish(published, *range(200_000, 230_000))
        numbers = []
        while await slow.poll(200):
            numbers.append(int.from_bytes((await slow.recv_multipart())[1], "big"))
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "only the last are missed here"
        assert numbers[-1] < published.stream.next_number - 1
        replayed = [number for number, _ in await subscriber.replay(numbers[-1] + 1)]
        assert replayed[-1] == published.stream.next_number - 1
        slow.close(linger=0)
        subscriber.close()


async def test_events_are_sent_to_a_collector_that_listens_elsewhere(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llm-d has it, where engines connect to one subscriber. No other machine is at hand, so this one's address is
    taken for another's."""
    monkeypatch.setattr("octavo.scheduler.server.kv_events.is_loopback", lambda host: False)
    collector = context.socket(zmq.SUB)
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    collector.subscribe(b"")
    async with publishing(
        KVEventsConfig(kv_events_endpoint=f"tcp://127.0.0.1:{port}", kv_events_interval_s=0.0)
    ) as published:
        name = 1
        while not await collector.poll(20):
            publish(published, name)
            name += 1
        assert (await collector.recv_multipart())[0] == b""
    collector.close(linger=0)


async def test_what_changes_in_one_interval_comes_in_one_batch(config: KVEventsConfig) -> None:
    async with publishing(replace(config, kv_events_interval_s=3600.0)) as published:
        assert published.stream
        publish(published, 1, 2, 3)
        assert published.stream.next_number == FIRST + 1


# -- options ----------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_nothing_is_counted() -> None:
    with kv_events(KVEventsConfig()) as published:
        assert published == Published()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "--insecure-kv-events"),
        ({"kv_events_endpoint": "tcp://router.example:5557"}, "--insecure-kv-events"),
        *(
            ({"kv_events_endpoint": endpoint, "insecure_kv_events": True}, "is no address; use .*tcp://")
            for endpoint in ("5557", "udp://*:5557", "tcp://5557", "tcp://*:", "tcp://*:x", "tcp://[::1:5557")
        ),
        # ZMQ would take its last 16 bits.
        ({"kv_events_endpoint": "tcp://localhost:99999"}, "is no address"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:5558"}, "without --kv-events-endpoint"),
        (
            {
                "kv_events_endpoint": "tcp://127.0.0.1:5557",
                "kv_events_replay_endpoint": "tcp://router.example:5558",
                "insecure_kv_events": True,
            },
            "is elsewhere",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EndpointError, match=complaint), kv_events(KVEventsConfig(**config)):
        raise AssertionError("it was taken")


def test_a_second_publisher_at_one_socket_is_refused(config: KVEventsConfig) -> None:
    with (
        kv_events(config),
        pytest.raises(EndpointError, match="another process is bound"),
        kv_events(config),
    ):
        raise AssertionError("it was taken")
