"""GET /live sends the snapshots that the page watches."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.page.live_view import MAX_VIEWERS
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_admin import FakeAdmin
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend


@pytest.fixture
def config(config: FrontendConfig, admin: FakeAdmin) -> FrontendConfig:
    return dataclasses.replace(config, scheduler_admin=admin.address)


class Viewer:
    """One reader of /live."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> Any:
        """The next event, without the comments before it."""
        async for line in self._lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                return json.loads(line.removeprefix("data: "))
        return None

    async def waiting(self) -> int:
        return int((await self.next())["load"]["waiting"])


@contextlib.asynccontextmanager
async def watching(http: httpx.AsyncClient, **headers: str) -> AsyncIterator[Viewer]:
    async with http.stream("GET", "/live", headers=headers) as response:
        yield Viewer(response)


async def refusal(http: httpx.AsyncClient, **headers: str) -> tuple[int, str]:
    answer = await http.get("/live", headers=headers)
    return answer.status_code, answer.json()["error"]["message"]


async def test_snapshots_come_as_the_scheduler_sends_them(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    admin.put(waiting=1)
    async with watching(http) as viewer:
        assert viewer.response.headers["content-type"].startswith("text/event-stream")
        assert await viewer.waiting() == 1
        admin.put(waiting=2)
        assert await viewer.waiting() == 2


async def test_a_snapshot_tells_whose_requests_are_this_frontends_and_what_its_clients_waited_for(
    http: httpx.AsyncClient, admin: FakeAdmin, scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any
) -> None:
    await eventually(lambda: scheduler.frontend_id)
    admin.put(waiting=1)
    async with watching(http) as viewer:
        before = await viewer.next()
        assert before["frontend_ids"] == [f"{scheduler.frontend_id:016x}"]
        told = [before[name] for name in ("first_tokens", "first_token_s", "between_tokens", "between_tokens_s")]
        assert told == [0, 0.0, 0, 0.0]
        # The first comes alone, and the others however they come.
        scheduler.hold_after = 1
        body = {"model": "byte-model", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
        answering = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: frontend.generation.latencies.first_tokens == 1)
        scheduler.hold_after = 1 << 30
        assert (await answering).status_code == 200
        admin.put(waiting=2)
        after = await viewer.next()
    assert (after["first_tokens"], after["between_tokens"]) == (1, 4)
    assert after["first_token_s"] > 0
    assert after["between_tokens_s"] > 0
    assert after["at_s"] > before["at_s"]


async def test_head_tells_the_same_and_watches_nothing(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    answer = await http.head("/live")
    assert (answer.status_code, answer.content) == (200, b"")
    admin.put(waiting=1)
    async with watching(http) as viewer:
        assert answer.headers["content-type"] == viewer.response.headers["content-type"]
        assert await viewer.waiting() == 1
    assert admin.calls == 1


async def test_all_viewers_share_one_call_which_ends_with_the_last(
    http: httpx.AsyncClient, admin: FakeAdmin, eventually: Any
) -> None:
    admin.put(waiting=1)
    async with watching(http) as first:
        assert await first.waiting() == 1
        async with watching(http) as second:
            assert await second.waiting() == 1
            admin.put(waiting=2)
            assert [await viewer.waiting() for viewer in (first, second)] == [2, 2]
        assert (admin.calls, admin.open_calls) == (1, 1)
    await eventually(lambda: admin.open_calls == 0)
    admin.put(waiting=3)
    async with watching(http) as again:
        assert await again.waiting() == 3
    assert admin.calls == 2


async def see_one(http: httpx.AsyncClient) -> int:
    async with watching(http) as viewer:
        return await viewer.waiting()


async def test_no_more_than_a_few_may_watch(http: httpx.AsyncClient, admin: FakeAdmin, eventually: Any) -> None:
    admin.put(waiting=1)
    async with contextlib.AsyncExitStack() as viewers:
        for _ in range(MAX_VIEWERS):
            await viewers.enter_async_context(watching(http))
        status, message = await refusal(http)
        assert (status, "close one" in message) == (429, True)
    await eventually(lambda: admin.open_calls == 0)
    admin.put(waiting=2)
    assert await see_one(http) == 2


async def test_a_scheduler_that_ends_is_told_of_and_found_again(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    admin.put(waiting=1)
    async with watching(http) as viewer:
        await viewer.next()
        admin.answers.put_nowait(None)
        assert (await viewer.next())["error"]["code"] == "scheduler_unreachable"
        assert await viewer.next() is None
    admin.put(waiting=2)
    assert await see_one(http) == 2


async def test_a_fault_of_ours_is_told_of(http: httpx.AsyncClient, admin: FakeAdmin, monkeypatch: Any) -> None:
    monkeypatch.setattr("octavo.frontend.page.live_view.to_snapshot", lambda answer: 1 / 0)
    admin.put(waiting=1)
    assert (await http.get("/live")).status_code == 500


async def test_viewers_do_not_keep_a_server_from_stopping(
    config: FrontendConfig, admin: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_frontend(config) as (server, stopping):
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
            watching_one(http, admin) as viewer,
        ):
            stopping.set()
            assert (await viewer.next())["error"]["code"] == "draining"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@contextlib.asynccontextmanager
async def watching_one(http: httpx.AsyncClient, admin: FakeAdmin) -> AsyncIterator[Viewer]:
    admin.put(waiting=1)
    async with watching(http) as viewer:
        await viewer.next()
        yield viewer


async def test_without_a_scheduler_to_ask_it_says_what_to_do(config: FrontendConfig) -> None:
    async with running(dataclasses.replace(config, scheduler_admin="")) as http:
        status, message = await refusal(http)
    assert (status, "--scheduler-admin" in message) == (503, True)


async def test_a_scheduler_that_is_not_there(config: FrontendConfig) -> None:
    async with running(dataclasses.replace(config, scheduler_admin="unix:/nowhere/admin.sock")) as http:
        assert (await refusal(http))[0] == 503


async def test_only_trusted_tenants_may_watch(config: FrontendConfig, admin: FakeAdmin, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json")
    async with running(dataclasses.replace(config, api_keys=keys)) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/page/live.js")).status_code == 200
        status, message = await refusal(http)
        assert (status, "API key" in message) == (401, True)
        status, message = await refusal(http, authorization=bearer("alice"))
        assert (status, "trusted" in message) == (401, True)
        assert admin.calls == 0
        admin.put(waiting=1)
        async with watching(http, authorization=bearer("gateway")) as viewer:
            assert await viewer.waiting() == 1


@contextlib.asynccontextmanager
async def running(config: FrontendConfig) -> AsyncIterator[httpx.AsyncClient]:
    async with running_frontend(config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            yield http
