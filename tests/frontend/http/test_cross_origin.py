"""Pages of origins that are named call from the browser and get the answers; all others stay shut out."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend

APP: Final = "https://app.example"
OTHER: Final = "https://evil.example"
BODY: Final = {"prompt": "x", "max_tokens": 3}
# What Chromium sends with `fetch`.
FETCH: Final = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
PREFLIGHT: Final = {
    **FETCH,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
def config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    keys: Any = write_keys(tmp_path / "keys.json")
    return dataclasses.replace(config, http_listen="127.0.0.1:0", api_keys=keys, allowed_origins=(APP,))


@pytest.fixture
async def client(frontend: FrontendServer, scheduler: FakeScheduler) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=60) as client:
        yield client


async def test_a_named_origin_calls_with_its_key(client: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    asked = await client.options("/v1/completions", headers={**PREFLIGHT, "origin": APP})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, APP)
    assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    for stream in (False, True):
        headers = {**FETCH, "origin": APP, "authorization": bearer("alice")}
        found = await client.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, APP), found.text
        assert "origin" in found.headers["vary"].lower()
        assert "access-control-allow-credentials" not in found.headers
    assert len(scheduler.submitted) == 2


async def test_a_named_origin_reads_its_errors(client: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    found = await client.post("/v1/completions", json=BODY, headers={**FETCH, "origin": APP})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (401, APP)
    headers = {**FETCH, "origin": APP, "authorization": bearer("alice")}
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        found = await client.get(path, headers=headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, APP)
    assert not scheduler.submitted


@pytest.mark.parametrize("origin", [OTHER, "null", "https://app.example.evil.example", "http://app.example", ""])
async def test_other_origins_stay_shut_out(client: httpx.AsyncClient, scheduler: FakeScheduler, origin: str) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("POST", FETCH), ("GET", FETCH)):
        asked = {**headers, "origin": origin, "authorization": bearer("alice")}
        found = await client.request(method, "/v1/completions", headers=asked, json=BODY)
        assert found.status_code == 403
        assert not any(name.startswith("access-control") for name in found.headers)
    assert not scheduler.submitted


async def test_a_named_origin_cannot_call_by_a_name_that_is_not_ours(client: httpx.AsyncClient) -> None:
    headers = {**PREFLIGHT, "origin": APP, "host": "evil.example"}
    assert (await client.options("/v1/completions", headers=headers)).status_code == 403


async def test_programs_get_no_origin_and_caches_are_told(client: httpx.AsyncClient) -> None:
    found = await client.get("/health")
    assert "access-control-allow-origin" not in found.headers
    assert found.headers["vary"] == "Origin"


async def test_without_named_origins_there_is_no_cors(config: FrontendConfig, scheduler: FakeScheduler) -> None:
    async with (
        running_frontend(dataclasses.replace(config, allowed_origins=())) as (frontend, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=60) as client,
    ):
        found = await client.options("/v1/completions", headers={**PREFLIGHT, "origin": APP})
        assert found.status_code == 403
        own = await client.get("/health", headers={"origin": str(client.base_url)})
        assert not {"vary", "access-control-allow-origin"} & own.headers.keys()
