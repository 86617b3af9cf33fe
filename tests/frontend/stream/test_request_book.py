"""Ids are a tenant's own: what others have under the same one is neither seen nor in the way."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from octavo.frontend.access.admission import Ticket
from octavo.frontend.config import FrontendConfig
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.observer import Observer
from octavo.frontend.stream.registry import RequestBook
from octavo.frontend.stream.running import RunningRequest
from octavo.runtime.telemetry import tracing
from octavo.testbed.credentials import bearer, write_keys
from octavo.testbed.grpc_calls import collect, ids_of, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

ALICE, BOB, GATEWAY = Caller("alice", False), Caller("bob", False), Caller("gateway", True)


def running(tenant: str, request_id: str = "mine") -> RunningRequest:
    return RunningRequest(
        GenerationRequest("x"), request_id, tenant, ANYBODY, 0.0, Mock(spec=Ticket), tracing.NOTHING, Observer()
    )


def test_an_id_means_each_tenant_its_own_request() -> None:
    book = RequestBook()
    requests = {caller: running(caller.tenant) for caller in (ALICE, BOB)}
    for request in requests.values():
        book.add(request)
    assert {caller: book.get("mine", caller) for caller in requests} == requests
    assert book.get("mine", Caller("carol", False)) is None
    assert set(book) == set(requests.values())


def test_to_the_trusted_an_id_means_the_oldest_request_of_all() -> None:
    book = RequestBook()
    first, second = running("bob"), running("gateway")
    book.add(first)
    book.add(second)
    assert book.get("mine", GATEWAY) is book.get("mine", ANYBODY) is first
    book.remove(first)
    assert book.get("mine", GATEWAY) is second
    book.remove(second)
    assert book.get("mine", GATEWAY) is None
    assert list(book) == []


class Client:
    """One tenant's calls."""

    def __init__(self, stub: Any, tenant: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", bearer(tenant)),)

    def generate(self, text: str = "hello", **fields: Any) -> Any:
        request = pb.GenerateRequest(request_id="mine", text=text, stopping={"max_new_tokens": 8}, **fields)
        return self._stub.Generate(request, metadata=self._metadata)

    def attach(self) -> Any:
        return self._stub.Attach(pb.AttachRequest(request_id="mine"), metadata=self._metadata)

    async def abort(self) -> list[str]:
        request = pb.AbortRequest(request_ids=["mine"])
        return list((await self._stub.Abort(request, metadata=self._metadata)).aborted)


@pytest.fixture
async def clients(
    scheduler: FakeScheduler, config: FrontendConfig, tmp_path: Path
) -> AsyncIterator[tuple[Client, Client, FrontendServer]]:
    config = dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"))
    async with (
        running_frontend(config) as (frontend, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        yield Client(stub, "alice"), Client(stub, "bob"), frontend


async def both_running(clients: Any, scheduler: FakeScheduler, eventually: Any) -> "list[asyncio.Task[Any]]":
    scheduler.hold_after = 0
    tasks = [asyncio.ensure_future(collect(client.generate())) for client in clients[:2]]
    await eventually(lambda: len(scheduler.running) == 2)
    return tasks


async def test_two_tenants_get_what_they_asked_for_under_the_same_id(clients: Any, scheduler: FakeScheduler) -> None:
    scheduler.answer = lambda request, index: [len(request.prompt_token_ids)] * 8
    alice, bob, _ = clients
    grace = {"detach_grace": {"seconds": 100}}
    first = await collect(alice.generate("hello", scheduling=grace))
    call = bob.generate("good day", scheduling=grace)
    second = await collect(call)
    assert [told[0].started.request_id for told in (first, second)] == ["mine", "mine"]
    assert [set(ids_of(told)) for told in (first, second)] == [{5}, {8}]
    headers = dict(await call.initial_metadata())
    assert (headers["x-request-id"], headers["x-prompt-tokens"]) == ("mine", "8")
    for client, told in ((alice, first), (bob, second)):
        assert [answer.event async for answer in client.attach()] == told


async def test_an_abort_ends_the_callers_own(clients: Any, scheduler: FakeScheduler, eventually: Any) -> None:
    tasks = await both_running(clients, scheduler, eventually)
    _, bob, frontend = clients
    assert await bob.abort() == ["mine"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tasks[1]
    assert reason_of(caught.value) == "ABORTED"
    await eventually(lambda: len(scheduler.running) == 1)
    assert frontend.generation.num_running == 1
    scheduler.hold_after = 1 << 30
    assert len(ids_of(await tasks[0])) == 8


async def test_an_id_is_taken_for_its_tenant_and_for_the_trusted(
    clients: Any, scheduler: FakeScheduler, eventually: Any
) -> None:
    scheduler.hold_after = 0
    alice, bob, frontend = clients
    held = asyncio.ensure_future(collect(alice.generate()))
    await eventually(lambda: scheduler.running == {"mine"})
    assert await bob.abort() == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(alice.generate())
    assert reason_of(caught.value) == "DUPLICATE_ID"
    assert frontend.generation.abort("mine", GATEWAY)
    await asyncio.gather(held, return_exceptions=True)
