"""The client for asyncio, where it differs from the other: it waits in the event loop."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from octavo.client import AsyncClient, Chat, Message, RequestError, RetryPolicy, UnavailableError
from octavo.testing.fakes.fake_frontend import FakeFrontend, status


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, retries=RetryPolicy(first_pause_s=0.0)) as client:
        yield client


async def test_the_calls(client: AsyncClient) -> None:
    assert (await client.generate("hi")).text == "one two three"
    assert (await client.chat([{"role": "user", "content": "hi"}])).text == "one two three"
    assert await client.tokenize("hi") == [104, 105]
    assert await client.tokenize(Chat([Message("user", "hi")])) == [1, 2]
    assert await client.detokenize([104, 105]) == "hi"
    assert [model.id for model in await client.models()] == ["m"]
    assert await client.abort("a") == ["a"]


@pytest.mark.parametrize("losses", [[1], [3, 2], [0], [4, 1, 1, 1], [7]])
async def test_a_stream_goes_on_where_it_was_lost(
    client: AsyncClient, frontend: FakeFrontend, losses: list[int]
) -> None:
    frontend.losses.extend(losses)
    assert [event.offset async for event in client.stream("hi")] == list(range(1, 8))


async def test_a_stream_that_the_server_forgot_is_lost(client: AsyncClient, frontend: FakeFrontend) -> None:
    frontend.forgets = True
    frontend.losses.append(4)
    with pytest.raises(UnavailableError, match="lost after event 4"):
        async for _ in client.stream("hi"):
            pass


async def test_many_streams_at_once(client: AsyncClient) -> None:
    results = await asyncio.gather(*(client.generate("hi") for _ in range(50)))
    assert {result.text for result in results} == {"one two three"}


async def test_a_closed_stream_is_aborted(client: AsyncClient, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    async with client.stream("hi") as stream:
        await anext(stream)
    assert frontend.aborted == [stream.request_id]


async def test_a_cancelled_task_aborts_its_request(client: AsyncClient, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    task = asyncio.create_task(client.generate("hi"))
    while not frontend.generated:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert frontend.aborted == [frontend.generated[0].request_id]


async def test_errors_are_the_same(client: AsyncClient, frontend: FakeFrontend) -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    frontend.refusals.append((code, status(code, "BAD_PARAMETER", field="top_p")))
    with pytest.raises(RequestError) as raised:
        await client.generate("hi")
    assert (raised.value.reason, raised.value.metadata) == ("BAD_PARAMETER", {"field": "top_p"})
