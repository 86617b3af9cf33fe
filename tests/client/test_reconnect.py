"""Both clients against a real frontend, over a wire that is cut."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.client import (
    AsyncClient,
    Client,
    Delta,
    Event,
    NotFoundError,
    RequestError,
    RequestOptions,
    RetryPolicy,
    SamplingParams,
    UnavailableError,
)
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.relay import Relay, relayed
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.wire.requests import Request
from octavo.wire.steps import ModelInfo

RETRIES = RetryPolicy(first_pause_s=0.01)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "byte-model"
    write_byte_model(directory, max_model_len=512)
    return directory


def answer(request: Request, index: int) -> list[int]:
    return list(range(40, 52))


@pytest.fixture
async def scheduler(model: Path, tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    info = ModelInfo("byte-model", fingerprint(model), "float32", VOCAB_SIZE, 512)
    fake = FakeScheduler(f"ipc://{tmp_path}/frontends.sock", info)
    fake.answer = answer
    async with fake.serving():
        yield fake


@pytest.fixture
async def frontend(scheduler: FakeScheduler, model: Path) -> AsyncIterator[FrontendServer]:
    config = FrontendConfig(model, "byte-model", "127.0.0.1:0", (scheduler.endpoint,), text_processes=1)
    async with running_frontend(config) as (server, _):
        yield server


@pytest.fixture
def relay(frontend: FrontendServer) -> Iterator[Relay]:
    with relayed(frontend.port) as relay:
        yield relay


@pytest.fixture
async def client(relay: Relay) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{relay.port}", retries=RETRIES) as client:
        yield client


def ids_of(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


async def collected(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


@pytest.mark.parametrize("held_after", [1, 5, 11])
async def test_a_stream_goes_on_after_its_wire_was_cut(
    scheduler: FakeScheduler, relay: Relay, client: AsyncClient, held_after: int
) -> None:
    scheduler.hold_after = held_after
    events: list[Event] = []
    async for event in client.stream("hello", PARAMS):
        events.append(event)
        if len(ids_of(events)) == held_after:
            relay.cut()
            scheduler.hold_after = 1 << 30
    assert ids_of(events) == answer(scheduler.submitted[0], 0)
    offsets = [event.offset for event in events]
    assert offsets == sorted(set(offsets))
    assert len(scheduler.submitted) == 1
    assert relay.connections >= 2


async def test_the_other_client_does_the_same(scheduler: FakeScheduler, relay: Relay) -> None:
    scheduler.hold_after = 5

    def read() -> list[Event]:
        events: list[Event] = []
        with Client(f"127.0.0.1:{relay.port}", retries=RETRIES) as client, client.stream("hello", PARAMS) as stream:
            for event in stream:
                events.append(event)
                if len(ids_of(events)) == 5:
                    relay.cut()
                    scheduler.hold_after = 1 << 30
        return events

    assert ids_of(await asyncio.to_thread(read)) == answer(scheduler.submitted[0], 0)
    assert len(scheduler.submitted) == 1


async def test_a_whole_answer_is_put_together_across_cuts(
    scheduler: FakeScheduler, relay: Relay, client: AsyncClient
) -> None:
    scheduler.hold_after = 3
    task = asyncio.create_task(client.generate("hello", PARAMS))
    while not scheduler.running:
        await asyncio.sleep(0.005)
    relay.cut()
    scheduler.hold_after = 1 << 30
    [completion] = (await task).completions
    assert list(completion.token_ids) == answer(scheduler.submitted[0], 0)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 12


async def test_without_a_grace_time_a_cut_ends_the_stream_and_the_request(
    scheduler: FakeScheduler, relay: Relay, client: AsyncClient
) -> None:
    scheduler.hold_after = 3
    events: list[Event] = []

    async def read() -> None:
        async for event in client.stream("hello", PARAMS, RequestOptions(detach_grace=0)):
            events.append(event)
            if len(ids_of(events)) == 3:
                relay.cut()

    with pytest.raises(UnavailableError, match="the stream was lost after event"):
        await read()
    while scheduler.running:
        await asyncio.sleep(0.005)


async def test_a_stream_that_is_closed_is_aborted_though_it_has_a_grace_time(
    scheduler: FakeScheduler, client: AsyncClient
) -> None:
    scheduler.hold_after = 3
    async with client.stream("hello", PARAMS) as stream:
        await anext(stream)
    while scheduler.running:
        await asyncio.sleep(0.005)
    assert scheduler.aborted == [stream.request_id]


async def test_a_stream_that_is_closed_while_it_waits_to_reconnect_is_aborted_and_stays_closed(
    scheduler: FakeScheduler, relay: Relay, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        waits.set()
        await goes_on.wait()

    scheduler.hold_after = 3
    stream = client.stream("hello", PARAMS)
    await anext(stream)
    monkeypatch.setattr("octavo.client.async_client.asyncio", SimpleNamespace(sleep=pause))
    rest = asyncio.create_task(collected(stream))
    relay.cut()
    await waits.wait()
    await stream.aclose()
    goes_on.set()
    async with asyncio.timeout(60):
        assert len(ids_of(await rest)) <= 3
    while scheduler.running:
        await asyncio.sleep(0.005)
    assert scheduler.aborted == [stream.request_id]
    assert len(scheduler.submitted) == 1


async def test_errors_of_the_real_frontend_are_read(client: AsyncClient, scheduler: FakeScheduler) -> None:
    with pytest.raises(RequestError) as raised:
        await client.generate("hello", SamplingParams(temperature=-1.0))
    assert (raised.value.reason, raised.value.metadata["field"]) == ("BAD_PARAMETER", "temperature")
    with pytest.raises(NotFoundError) as missing:
        await client.generate("hello", options=RequestOptions(model="other"))
    assert missing.value.reason == "MODEL_NOT_FOUND"


async def test_the_other_calls_of_the_real_frontend(client: AsyncClient, frontend: FrontendServer) -> None:
    ids = await client.tokenize("hello")
    assert ids == frontend.generation.tokenizer.encode("hello")
    assert await client.detokenize(ids) == "hello"
    assert [model.id for model in await client.models()] == ["byte-model"]
    assert await client.abort("nobody") == []
