"""SubscribeKvEvents through the real frontend's port: what a scheduler publishes, in the messages of smg-grpc-proto."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc as services  # type: ignore[import-untyped]
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.frontend.cli.frontend import _check_kv_events
from octavo.frontend.config import FrontendConfig
from octavo.runtime.transport.endpoints import EndpointError, endpoint_to_connect
from octavo.scheduler.server.kv_events import EventForm, KVEventsConfig, Published, kv_events
from octavo.testbed.grpc_calls import reason_of
from octavo.testing.fakes.cached_blocks import CachedBlocks
from octavo.testing.frontends import running_frontend

_PATIENCE_S = 60.0


class Publisher:
    """A scheduler as far as its KV events go."""

    def __init__(self, published: Published) -> None:
        assert published.census
        assert published.stream
        self.stream, self.replica = published.stream, CachedBlocks(published.census)

    def store(self, *token_ids: int, first: int = 0) -> int:
        """Publishes that blocks of two tokens are held; returns the number of the batch."""
        self.replica.hold([*token_ids], first)
        return self._publish()

    def remove(self, *token_ids: int, first: int = 0) -> int:
        self.replica.drop([*token_ids], first)
        return self._publish()

    def _publish(self) -> int:
        self.stream.publish()
        return self.stream.next_number - 1


@asynccontextmanager
async def publishing(directory: Path, **options: Any) -> AsyncIterator[Publisher]:
    config = KVEventsConfig(
        kv_events_endpoint=f"ipc://{directory}/events.sock",
        kv_events_replay_endpoint=f"ipc://{directory}/replay.sock",
        kv_events_interval_s=0.0,
        **options,
    )
    with kv_events(config) as published:
        assert published.replays
        running = asyncio.create_task(published.replays.run())
        yield Publisher(published)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    async with publishing(tmp_path) as publisher:
        yield publisher


@pytest.fixture
async def subscribe(tmp_path: Path, config: FrontendConfig) -> AsyncIterator[Callable[[int], Any]]:
    """Subscribes at a frontend that knows where a scheduler of this directory publishes."""
    config = replace(
        config,
        scheduler_kv_events=f"ipc://{tmp_path}/events.sock",
        scheduler_kv_events_replay=f"ipc://{tmp_path}/replay.sock",
    )
    async with AsyncExitStack() as held:
        server, _ = await held.enter_async_context(running_frontend(config))
        channel = await held.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
        engine = services.VllmEngineStub(channel)
        yield lambda start: engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start))


async def read(call: Any, count: int) -> list[Any]:
    async with asyncio.timeout(_PATIENCE_S):
        return [await call.read() for _ in range(count)]


@pytest.mark.parametrize("form", EventForm)
async def test_events_come_as_messages(tmp_path: Path, subscribe: Callable[[int], Any], form: EventForm) -> None:
    async with publishing(tmp_path, kv_events_form=form) as publisher:
        # A child whose hash is a negative number where it is signed.
        child = next(n for n in range(100) if publisher.replica.hashes([1, 2, n, n])[1] >= 1 << 63)
        hashes = publisher.replica.hashes([1, 2, child, child])
        numbers = [publisher.store(1, 2), publisher.store(1, 2, child, child, first=1)]
        numbers.append(publisher.remove(1, 2, child, child, first=1))
        call = subscribe(0)
        first, second, third = batches = await read(call, 3)
        call.cancel()
    assert [batch.sequence_number for batch in batches] == numbers
    assert {batch.dp_rank for batch in batches} == {0}
    cleared, stored = first.events
    assert cleared.HasField("cleared")
    block = common.KvBlock(block_hash=signed(hashes[0]), token_ids=[1, 2], block_size=2, cache_level=0)
    told: dict[str, Any] = {"tier": common.KV_CACHE_TIER_DEVICE, "medium": "GPU", "group_idx": 0}
    kind = {"kv_cache_spec_kind": "full_attention"}
    assert stored.stored == common.KvBlocksStored(blocks=[block], **told, **kind)
    assert signed(hashes[1]) < 0
    block = common.KvBlock(block_hash=signed(hashes[1]), token_ids=[child, child], block_size=2, cache_level=0)
    (stored,) = second.events
    assert stored.stored == common.KvBlocksStored(blocks=[block], parent_block_hash=signed(hashes[0]), **told, **kind)
    (removed,) = third.events
    assert removed.removed == common.KvBlocksRemoved(block_hashes=[signed(hashes[1])], cache_level=0, **told)


def signed(value: int) -> int:
    return int.from_bytes(value.to_bytes(8), signed=True)


async def test_what_comes_later_is_streamed_on(publisher: Publisher, subscribe: Callable[[int], Any]) -> None:
    numbers = [publisher.store(1, 1)]
    call = subscribe(0)
    batches = await read(call, 1)
    for name in range(2, 50):
        numbers.append(publisher.store(name, name))
        await asyncio.sleep(0)
    # Before the frontend's subscription has reached the scheduler it misses some, and has them replayed later.
    while len(batches) < len(numbers):
        numbers.append(publisher.store(1000, len(numbers)))
        try:
            async with asyncio.timeout(0.05):
                while len(batches) < len(numbers):
                    batches.append(await call.read())
        except TimeoutError:
            call.cancel()
            call = subscribe(batches[-1].sequence_number)
            (again,) = await read(call, 1)
            assert again.sequence_number == batches[-1].sequence_number
    assert [batch.sequence_number for batch in batches] == numbers
    call.cancel()


async def test_a_gateway_goes_on_from_the_batch_that_it_has(
    publisher: Publisher, subscribe: Callable[[int], Any]
) -> None:
    numbers = [publisher.store(name, name) for name in range(1, 6)]
    call = subscribe(numbers[2])
    assert [batch.sequence_number for batch in await read(call, 3)] == numbers[2:]
    call.cancel()


async def test_headers_come_before_the_first_event(publisher: Publisher, subscribe: Callable[[int], Any]) -> None:
    call = subscribe(0)
    async with asyncio.timeout(_PATIENCE_S):
        await call.initial_metadata()
    call.cancel()


async def test_one_who_has_been_away_for_too_long_begins_anew(tmp_path: Path, subscribe: Callable[[int], Any]) -> None:
    async with publishing(tmp_path, kv_events_buffer=2) as publisher:
        numbers = [publisher.store(name, name) for name in range(1, 6)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(subscribe(numbers[0]), 1)
        assert raised.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert reason_of(raised.value) == "KV_EVENTS_GONE"
        call = subscribe(0)
        assert [batch.sequence_number for batch in await read(call, 2)] == numbers[-2:]
        call.cancel()


async def test_one_who_outlives_a_scheduler_is_told_that_events_are_lost(
    tmp_path: Path, subscribe: Callable[[int], Any]
) -> None:
    async with publishing(tmp_path) as publisher:
        publisher.store(1, 1)
        call = subscribe(0)
        await read(call, 1)
    async with publishing(tmp_path) as publisher:

        async def publish() -> None:
            for name in range(2, 10_000):
                publisher.store(name, name)
                await asyncio.sleep(0.02)

        coming = asyncio.create_task(publish())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(call, 1)
        assert raised.value.code() is grpc.StatusCode.DATA_LOSS
        assert reason_of(raised.value) == "KV_EVENTS_LOST"
        call = subscribe(0)
        (first,) = await read(call, 1)
        assert first.events[0].HasField("cleared")
        call.cancel()
        coming.cancel()


async def test_without_a_scheduler_gateways_try_again(
    subscribe: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.frontend.vllm_engine.kv_events._PATIENCE_S", 0.05)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(subscribe(0), 1)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(raised.value) == "SCHEDULER_UNREACHABLE"


async def test_there_is_room_again_once_a_gateway_has_hung_up(
    publisher: Publisher, subscribe: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.frontend.vllm_engine.servicer._MOST_SUBSCRIBERS", 1)
    publisher.store(1, 1)
    first = subscribe(0)
    await read(first, 1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(subscribe(0), 1)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            call = subscribe(0)
            try:
                await read(call, 1)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
    call.cancel()


@pytest.mark.parametrize(("num_schedulers", "has_api_keys"), [(2, False), (1, True)])
def test_events_are_passed_on_of_one_scheduler_by_a_frontend_that_asks_nobody_for_a_key(
    num_schedulers: int, has_api_keys: bool
) -> None:
    with pytest.raises(EndpointError, match="give gateways"):
        _check_kv_events(num_schedulers, has_api_keys=has_api_keys)
    _check_kv_events(1, has_api_keys=False)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "5557", "tcp://host"])
def test_an_endpoint_that_is_none_to_connect_to_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        endpoint_to_connect(endpoint)
    assert endpoint_to_connect("tcp://scheduler:5557") == "tcp://scheduler:5557"
    assert endpoint_to_connect("") == ""
