"""Failures of the service have their own status and code, and say when to try again."""

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
from octavo.testing.fakes.fake_scheduler import FakeScheduler

ASK = {"prompt": "hello", "max_tokens": 8}


@pytest.fixture
def post(http: httpx.AsyncClient) -> Callable[..., Any]:
    """Asks for a completion, and gives status, code and headers of the refusal."""

    async def post(**fields: Any) -> tuple[int, str, httpx.Headers]:
        response = await http.post("/v1/completions", json={**ASK, **fields})
        return response.status_code, response.json()["error"]["code"], response.headers

    return post


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_beyond_its_deadline_is_a_timeout(
    scheduler: FakeScheduler, post: Any, eventually: Any, stream: bool
) -> None:
    scheduler.hold_after = 0
    assert (await post(timeout=0.1, stream=stream))[:2] == (504, "deadline")
    await eventually(lambda: scheduler.running == set())


async def test_the_time_in_the_queue_is_the_schedulers_to_watch(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={**ASK, "max_queue_time": 2.5})
    assert scheduler.submitted[0].max_queue_ms == 2500


async def test_a_fault_of_ours_tells_nothing(
    scheduler: FakeScheduler, frontend: FrontendServer, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(frontend.generation, "generate", broken)
    assert (await post())[:2] == (500, "internal")


@pytest.mark.parametrize("key", ["sk-right-0123456789", "sk-wrong-0123456789"])
async def test_only_calls_with_a_valid_key_are_answered(scheduler: FakeScheduler, url: str, key: str) -> None:
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


async def test_the_metrics_are_for_trusted_keys_as_they_tell_of_all_tenants(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    for key, status in (("sk-right-0123456789", 401), ("sk-trusted-0123456789", 200)):
        answer = await http.get("/metrics", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
        assert ("octavo_requests_arrived" in answer.text) is (status == 200)


async def test_too_many_requests_leave_no_room_for_texts_and_tokens_alone(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    scheduler.hold_after = 1
    async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        # Kept, for it takes the connection with it.
        chunks = response.aiter_raw()
        await anext(chunks)
        for path, body in (
            ("/tokenize", {"prompt": "hello"}),
            ("/detokenize", {"tokens": [5]}),
            ("/v1/completions", {"prompt": [5], "echo": True}),
        ):
            assert (await http.post(path, json=body)).status_code == 429, path
    assert len(scheduler.submitted) == 1


@pytest.fixture
def config(config: FrontendConfig, request: pytest.FixtureRequest, tmp_path: Path) -> FrontendConfig:
    name = request.node.name
    if "key" in name:
        keys = tmp_path / "keys.json"
        tenants = {
            "one": {"keys": ["sk-right-0123456789"]},
            "operator": {"keys": ["sk-trusted-0123456789"], "trusted": True},
        }
        keys.write_text(json.dumps({"tenants": tenants}))
        return dataclasses.replace(config, api_keys=keys)
    if "too_many" in name:
        return dataclasses.replace(config, max_requests=1)
    return config
