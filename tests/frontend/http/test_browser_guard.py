"""Calls that pages of other sites make browsers send are refused, whatever their content type."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend

BODY = b'{"prompt": "x", "max_tokens": 3}'
# What Chromium sends with `navigator.sendBeacon`, or `fetch` without a preflight, of a text, a Blob, an Uint8Array.
BEACON = {
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "no-cors",
    "sec-fetch-dest": "empty",
    "origin": "http://evil.example",
}
# Not where the page comes over plain HTTP from another machine.
BARE_BEACON = {"origin": "http://evil.example"}
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0")


async def ask(
    port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, bytes]:
    """Status and body. The headers are all that there are but the length."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"host": f"127.0.0.1:{port}", **(headers or {}), "content-length": str(len(body)), "connection": "close"}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


@pytest.mark.parametrize(
    "foreign",
    [
        BEACON,
        BARE_BEACON,
        {**BEACON, "sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"origin": "http://["},
        {**BEACON, "content-type": "application/json"},
    ],
)
async def test_a_foreign_page_runs_nothing(
    frontend: FrontendServer, scheduler: FakeScheduler, foreign: dict[str, str]
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        status, content = await ask(frontend.http_port, "POST", path, foreign, BODY)
        assert (status, b"cross_site" in content) == (403, True), path
    assert not scheduler.submitted


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json"}])
@pytest.mark.parametrize("own", [None, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {}])
async def test_programs_and_pages_of_its_own_get_in(
    frontend: FrontendServer, scheduler: FakeScheduler, headers: dict[str, str], own: dict[str, str] | None
) -> None:
    port = frontend.http_port
    origin = {} if own is None else {"origin": f"http://127.0.0.1:{port}"}
    status, content = await ask(port, "POST", "/v1/completions", {**headers, **(own or {}), **origin}, BODY)
    assert status == 200, content


async def test_a_proxy_that_ends_tls_keeps_the_name(config: FrontendConfig, scheduler: FakeScheduler) -> None:
    async with running_frontend(dataclasses.replace(config, allowed_hosts=("api.example",))) as (frontend, _):
        for headers in ({"origin": "https://api.example"}, {"origin": "https://api.example:443"}):
            found = await ask(frontend.http_port, "POST", "/v1/completions", {**headers, "host": "api.example"}, BODY)
            assert found[0] == 200, found
        other = {"origin": "https://api.example:8443", "host": "api.example"}
        assert (await ask(frontend.http_port, "POST", "/v1/completions", other, BODY))[0] == 403


async def test_a_foreign_page_reads_nothing_but_may_link_here(
    frontend: FrontendServer, scheduler: FakeScheduler
) -> None:
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    for path in ("/live", "/v1/models", "/metrics", "/"):
        assert (await ask(frontend.http_port, "GET", path, image))[0] == 403
    assert (await ask(frontend.http_port, "GET", "/", NAVIGATION))[0] == 200
    # A form of another site is a navigation, too.
    assert (await ask(frontend.http_port, "POST", "/v1/completions", NAVIGATION, BODY))[0] == 403


async def test_a_name_that_was_made_to_point_here_is_not_served(
    frontend: FrontendServer, scheduler: FakeScheduler
) -> None:
    """For the browser the page is at home."""
    port = frontend.http_port
    rebound = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}", "sec-fetch-site": "same-origin"}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/live")):
        status, content = await ask(port, method, path, rebound, BODY)
        assert (status, b"host_not_allowed" in content) == (403, True), path
    assert not scheduler.submitted


@pytest.mark.parametrize("host", ["10.42.0.7:8000", "octavo-frontend", "evil.example"])
async def test_probes_may_use_any_name(frontend: FrontendServer, host: str) -> None:
    for path in ("/livez", "/health", "/ready"):
        assert (await ask(frontend.http_port, "GET", path, {"host": host}))[0] in (200, 503)
        assert (await ask(frontend.http_port, "POST", path, {**BEACON, "host": host}))[0] == 403


async def test_an_address_scrapes_metrics(frontend: FrontendServer) -> None:
    assert (await ask(frontend.http_port, "GET", "/metrics", {"host": "10.42.0.7:8000"}))[0] == 200


async def test_a_key_does_not_help_a_foreign_page(
    config: FrontendConfig, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    keys: Any = write_keys(tmp_path / "keys.json")
    async with running_frontend(dataclasses.replace(config, api_keys=keys)) as (frontend, _):
        alice = {"authorization": bearer("alice")}
        assert (await ask(frontend.http_port, "POST", "/v1/completions", {**BEACON, **alice}, BODY))[0] == 403
        assert (await ask(frontend.http_port, "POST", "/v1/completions", alice, BODY))[0] == 200
