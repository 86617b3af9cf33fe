"""A cell as Dynamo's worker sees it, over real connections to a frontend in name only."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2

from octavo.client.channels import open_async_channel
from octavo.client.errors import AuthenticationError, OctavoError, UnavailableError
from octavo.client.results import Model
from octavo.dynamo.cell import Cell
from octavo.dynamo.chunks import CANCELLED, Chunk
from octavo.testing.fakes.fake_frontend import FakeFrontend, script, serving, status
from octavo.v1 import generation_pb2 as pb

from .test_requests import PLAIN

SERVICE = "octavo.v1.GenerationService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class FrontendInName(FakeFrontend):
    """Knows whether a call has ended, by whose doing whatever."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        # What the next calls are told that there is, in place of a model that serves.
        self.models: deque[pb.Model] = deque()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        context.add_callback(self.ended.set)
        yield from super().Generate(request, context)

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self._begin("models", 0, context)
        if self.models:
            return pb.ListModelsResponse(models=[self.models.popleft()])
        return super().ListModels(request, context)


@pytest.fixture
def frontend() -> FrontendInName:
    fake = FrontendInName()
    fake.script = script("one ", "two ", "three")
    return fake


@pytest.fixture
def probes() -> health.HealthServicer:
    probes = health.HealthServicer()
    probes.set(SERVICE, SERVING)
    return probes


@pytest.fixture
def address(frontend: FrontendInName, probes: health.HealthServicer) -> Iterator[str]:
    with serving(frontend, probes=probes) as address:
        yield address


@pytest_asyncio.fixture
async def cell(address: str) -> AsyncIterator[Cell]:
    cell = Cell(open_async_channel(address), (("authorization", "Bearer key"),))
    yield cell
    await cell.close(0)


async def begun(cell: Cell, frontend: FrontendInName, name: str) -> AsyncGenerator[Chunk]:
    """A request that has brought its first tokens, and brings no more until the frontend may go on."""
    frontend.go_on.clear()
    frontend.script = script("one ", "two ")[2:]
    answer = cell.generate(PLAIN, name)
    assert bytes((await anext(answer))["token_ids"]) == b"one "
    return answer


async def all_of(cell: Cell, name: str = "a") -> list[Chunk]:
    return [chunk async for chunk in cell.generate(PLAIN, name)]


async def test_an_answer_is_its_tokens_and_its_end(cell: Cell, frontend: FrontendInName) -> None:
    chunks = await all_of(cell, "7f")
    assert bytes(token for chunk in chunks for token in chunk["token_ids"]) == b"one two three"
    assert [chunk.get("finish_reason") for chunk in chunks] == [None, None, None, "stop"]
    [asked] = frontend.generated
    assert asked.request_id.startswith("7f-")
    assert list(asked.token_ids.ids) == PLAIN["token_ids"]
    assert frontend.metadata["authorization"] == "Bearer key"


async def test_requests_of_one_id_have_ids_of_their_own(cell: Cell, frontend: FrontendInName) -> None:
    long = "x" * 500
    await asyncio.gather(all_of(cell, long), all_of(cell, long))
    first, second = (asked.request_id for asked in frontend.generated)
    assert first != second
    assert max(len(first), len(second)) <= 128


async def test_an_aborted_request_ends_and_others_go_on(cell: Cell, frontend: FrontendInName) -> None:
    first, second = await begun(cell, frontend, "a"), await begun(cell, frontend, "b")
    cell.abort("a")
    assert [chunk async for chunk in first] == [CANCELLED]
    frontend.go_on.set()
    assert [chunk async for chunk in second][-1]["finish_reason"] == "stop"


async def test_a_request_whose_reader_goes_is_cancelled(cell: Cell, frontend: FrontendInName) -> None:
    answer = await begun(cell, frontend, "a")
    [call] = cell._calls
    await answer.aclose()
    assert call.cancelled()
    assert await asyncio.to_thread(frontend.ended.wait, 60)


async def test_the_cancellation_of_its_reader_stays_one(cell: Cell, frontend: FrontendInName) -> None:
    answer = await begun(cell, frontend, "a")
    reader = asyncio.ensure_future(anext(answer))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(frontend.ended.wait, 60)


async def test_errors_of_the_cell_keep_their_reason(cell: Cell, frontend: FrontendInName) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    frontend.refusals.append((code, status(code, "QUEUE_FULL", retry_after_s=2.0)))
    with pytest.raises(OctavoError) as caught:
        await all_of(cell)
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 2.0)


@pytest.mark.parametrize("events", [0, 3])
async def test_a_lost_connection_is_an_error_at_once(cell: Cell, frontend: FrontendInName, events: int) -> None:
    frontend.losses.append(events)
    with pytest.raises(UnavailableError):
        await all_of(cell)
    assert len(frontend.calls) == 1


async def test_an_answer_without_an_end_is_an_error(cell: Cell, frontend: FrontendInName) -> None:
    frontend.script = frontend.script[:-1]
    with pytest.raises(UnavailableError, match="before its last event"):
        await all_of(cell)


async def test_closing_lets_requests_end(address: str, frontend: FrontendInName) -> None:
    cell = Cell(open_async_channel(address))
    answer = await begun(cell, frontend, "a")
    closing = asyncio.create_task(cell.close(60))
    await asyncio.sleep(0)
    frontend.go_on.set()
    assert [chunk async for chunk in answer][-1]["finish_reason"] == "stop"
    await closing


async def test_requests_that_outlast_the_drain_end_so_that_they_go_elsewhere(
    address: str, frontend: FrontendInName
) -> None:
    cell = Cell(open_async_channel(address))
    answer = await begun(cell, frontend, "a")
    closing = asyncio.create_task(cell.close(0))
    with pytest.raises(UnavailableError, match="go elsewhere"):
        await anext(answer)
    await closing


async def test_a_cell_is_ready_when_its_frontend_serves(
    cell: Cell, probes: health.HealthServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.dynamo.cell._PAUSE_S", 0.01)
    probes.set(SERVICE, NOT_SERVING)
    waiting = asyncio.create_task(cell.ready())
    await asyncio.wait({waiting}, timeout=0.1)
    assert not waiting.done()
    probes.set(SERVICE, SERVING)
    assert await waiting == [Model("m", 64, True, block_size=16, kv_blocks=10)]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL]
)
async def test_a_cell_that_goes_as_it_is_asked_what_it_serves_is_waited_for(
    cell: Cell, frontend: FrontendInName, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    monkeypatch.setattr("octavo.dynamo.cell._PAUSE_S", 0.01)
    frontend.refusals.append((code, Status(code=code.value[0], message="Socket closed")))
    assert [model.id for model in await cell.ready()] == ["m"]
    assert len(frontend.calls) == 2


async def test_a_cell_whose_last_worker_goes_as_it_is_asked_is_waited_for(
    cell: Cell, frontend: FrontendInName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.dynamo.cell._PAUSE_S", 0.01)
    frontend.models.append(pb.Model(id="m"))
    assert [model.max_model_len for model in await cell.ready()] == [64]
    assert len(frontend.calls) == 2


async def test_a_cell_that_refuses_to_say_what_it_serves_is_an_error(cell: Cell, frontend: FrontendInName) -> None:
    code = grpc.StatusCode.UNAUTHENTICATED
    frontend.refusals.append((code, status(code, "UNAUTHENTICATED")))
    with pytest.raises(AuthenticationError):
        await cell.ready()


async def test_a_cell_leaves_when_it_takes_no_more_requests(cell: Cell, probes: health.HealthServicer) -> None:
    left = asyncio.create_task(cell.left())
    await asyncio.wait({left}, timeout=0.1)
    assert not left.done()
    probes.set(SERVICE, NOT_SERVING)
    assert "no worker" in await left


async def test_a_cell_leaves_when_its_frontend_is_away(frontend: FrontendInName, probes: health.HealthServicer) -> None:
    with serving(frontend, probes=probes) as address:
        cell = Cell(open_async_channel(address))
        left = asyncio.create_task(cell.left())
        await cell.ready()
    assert "its frontend" in await left
    await cell.close(0)
