"""What keeps a good request from being answered, each with its status, its code, and when to come again."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fake_scheduler import FakeScheduler
from octavo.wire.requests import RejectReason

ASK = {"prompt": "hello", "max_tokens": 8}


@pytest.fixture
def post(http: httpx.AsyncClient) -> Callable[..., Any]:
    """Asks for a completion, and gives status, code and headers of the refusal."""

    async def post(**fields: Any) -> tuple[int, str, httpx.Headers]:
        response = await http.post("/v1/completions", json={**ASK, **fields})
        return response.status_code, response.json()["error"]["code"], response.headers

    return post


@pytest.mark.parametrize(
    ("reason", "status", "retries"),
    [
        (RejectReason.QUEUE_FULL, 429, True),
        (RejectReason.NEVER_FITS_KV, 400, False),
        (RejectReason.QUEUE_TIMEOUT, 504, False),
        (RejectReason.STEP_FAILED, 500, False),
        (RejectReason.BAD_GRAMMAR, 400, False),
    ],
)
async def test_what_the_scheduler_rejects(
    scheduler: FakeScheduler, post: Any, reason: RejectReason, status: int, retries: bool
) -> None:
    scheduler.rejection = reason
    found, code, headers = await post()
    assert found == status
    assert code != "internal"
    assert ("retry-after" in headers) is retries
    if retries:
        assert int(headers["retry-after"]) >= 1


async def test_an_id_that_is_running(scheduler: FakeScheduler, http: httpx.AsyncClient, post: Any) -> None:
    scheduler.hold_after = 1
    async with http.stream("POST", "/v1/completions", json={**ASK, "request_id": "same", "stream": True}) as response:
        await anext(response.aiter_raw())
        assert (await post(request_id="same"))[:2] == (409, "duplicate_id")


async def test_no_worker(scheduler: FakeScheduler, frontend: FrontendServer, post: Any, eventually: Any) -> None:
    await eventually(lambda: frontend.generation.ready)
    await scheduler.set_replicas(0)
    await eventually(lambda: not frontend.generation.ready)
    status, code, headers = await post()
    assert (status, code) == (503, "no_worker")
    assert int(headers["retry-after"]) >= 1


async def test_no_scheduler(post: Any) -> None:
    assert (await post())[:2] == (503, "scheduler_unreachable")


async def test_a_frontend_that_drains(scheduler: FakeScheduler, frontend: FrontendServer, post: Any) -> None:
    frontend.generation.draining = True
    assert (await post())[:2] == (503, "draining")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline(scheduler: FakeScheduler, post: Any, eventually: Any, stream: bool) -> None:
    scheduler.hold_after = 0
    assert (await post(timeout=0.1, stream=stream))[:2] == (504, "deadline")
    await eventually(lambda: scheduler.running == set())


async def test_the_time_in_the_queue_is_the_schedulers_to_watch(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={**ASK, "max_queue_time": 2.5})
    assert scheduler.submitted[0].max_queue_ms == 2500


async def test_too_many_requests(scheduler: FakeScheduler, http: httpx.AsyncClient, post: Any) -> None:
    scheduler.hold_after = 1
    async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        await anext(response.aiter_raw())
        status, code, headers = await post()
        assert (status, code) == (429, "too_many_requests")
        assert int(headers["retry-after"]) >= 1


async def test_an_abort_by_id(scheduler: FakeScheduler, frontend: FrontendServer, post: Any, eventually: Any) -> None:
    scheduler.hold_after = 0
    asking = asyncio.create_task(post(request_id="mine"))
    await eventually(lambda: scheduler.running == {"mine"})
    assert frontend.generation.abort("mine")
    assert (await asking)[:2] == (409, "aborted")


async def test_a_fault_of_ours_tells_nothing(
    scheduler: FakeScheduler, frontend: FrontendServer, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(frontend.generation, "generate", broken)
    assert (await post())[:2] == (500, "internal")


@pytest.mark.parametrize("key", ["sk-right-0123456789", "sk-wrong-0123456789"])
async def test_keys(scheduler: FakeScheduler, url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        asking = client.completions.create(model="byte-model", prompt="x", max_tokens=1)
        if "right" in key:
            assert (await asking).choices
            return
        with pytest.raises(openai.AuthenticationError) as caught:
            await asking
    assert caught.value.code == "unauthenticated"
    assert scheduler.submitted == []


async def test_a_refusal_for_want_of_a_key_has_an_id_too(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=ASK)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


async def test_a_tenant_is_told_by_the_key(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    headers = {"authorization": "Bearer sk-right-0123456789"}
    await http.post("/v1/completions", json=ASK, headers=headers)
    assert scheduler.submitted[0].tenant == "one"
    other = await http.post("/v1/completions", json=ASK, headers={**headers, "x-tenant-id": "two"})
    assert other.status_code == 400


@pytest.fixture
def config(config: FrontendConfig, request: pytest.FixtureRequest, tmp_path: Path) -> FrontendConfig:
    name = request.node.name
    if "key" in name:
        keys = tmp_path / "keys.json"
        keys.write_text(json.dumps({"tenants": {"one": {"keys": ["sk-right-0123456789"]}}}))
        return dataclasses.replace(config, api_keys=keys)
    if "too_many" in name:
        return dataclasses.replace(config, max_requests=1)
    return dataclasses.replace(config, scheduler_grace_s=0.3 if "no_scheduler" in name else 1.5)
