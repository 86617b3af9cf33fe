"""Every route but those of a short list asks for a key, and the key names the caller."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from octavo.frontend.access.access import Access, Bounds, read_api_keys
from octavo.frontend.app import build_app
from octavo.frontend.config import FrontendConfig
from octavo.frontend.http.guards import AccessMiddleware
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import KEYS, bearer, write_keys

# Probes carry no key, and the page asks its reader for one. Nothing else is to be added here.
OPEN = {("GET", path) for path in ("/livez", "/health", "/ready", "/")}
OPEN_BELOW = "/page/"
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer wrong"},
    {"x-api-key": "wrong"},
    {"authorization": KEYS["alice"]},
)
ALICE = {"authorization": bearer("alice")}


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(read_api_keys(write_keys(tmp_path / "keys.json"), Bounds()))


def client(app: Any, access: Access) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(AccessMiddleware(app, access)), base_url="http://octavo")


def who(request: Request) -> JSONResponse:
    return JSONResponse(request.state.caller.tenant if hasattr(request.state, "caller") else None)


@pytest.fixture
def asked(access: Access) -> httpx.AsyncClient:
    """Of an app that says who calls, whatever the path and the method."""
    every = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
    return client(Starlette(routes=[Route("/{path:path}", who, methods=every)]), access)


def table(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of every route, also of those that are mounted."""
    for route in routes:
        path = prefix + getattr(route, "path", "")
        if inner := getattr(route, "routes", None):
            yield from table(inner, path)
        else:
            yield from ((method, path or "/") for method in getattr(route, "methods", None) or ["GET"])


def is_open(method: str, path: str) -> bool:
    return ("GET" if method == "HEAD" else method, path) in OPEN or f"{path}/".startswith(OPEN_BELOW)


async def test_every_route_but_those_of_the_list_asks_for_a_key(
    frontend: FrontendServer, config: FrontendConfig, access: Access
) -> None:
    app = build_app(frontend.generation, access, config)
    known = {(method, path) for method, path in table(list(app.routes)) if not is_open(method, path)}
    assert ("POST", "/v1/chat/completions") in known
    async with client(app, access) as http:
        for method, path in known | {("GET", "/v1/unknown"), ("DELETE", "/health"), ("OPTIONS", "/v1/models")}:
            for headers in WRONG:
                answer = await http.request(method, path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)


async def test_a_refusal_is_an_error_as_clients_know_it(asked: httpx.AsyncClient) -> None:
    answer = await asked.post("/v1/completions", headers=ALICE | {"authorization": "Bearer wrong"}, content=b"{")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["error"]["code"] == "unauthenticated"
    assert "wrong" not in answer.text


@pytest.mark.parametrize(
    "headers", [ALICE, {"x-api-key": KEYS["alice"]}, {"Authorization": f"BEARER {KEYS['alice']}", "x-api-key": "wrong"}]
)
async def test_the_app_knows_the_caller(asked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await asked.post("/v1/completions", headers=headers)).json() == "alice"


@pytest.mark.parametrize("path", ["/livez", "/health", "/ready", "/", "/page/app.js"])
async def test_probes_and_the_page_need_no_key(asked: httpx.AsyncClient, path: str) -> None:
    for headers in ({}, ALICE):
        answer = await asked.get(path, headers=headers)
        assert (answer.status_code, answer.json()) == (200, None)
    assert (await asked.post(path)).status_code == 401


@pytest.mark.parametrize(
    "path", ["/pages", "/page", "/health/", "/Health", "/health/x", "/v1/models?x=/page/", "/%70age", "/metrics"]
)
async def test_paths_that_only_look_exempt_need_a_key(asked: httpx.AsyncClient, path: str) -> None:
    assert (await asked.get(path)).status_code == 401


async def test_websockets_are_closed(access: Access) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a stranger")

    scope = {"type": "websocket", "path": "/health", "headers": []}
    await AccessMiddleware(Starlette(), access)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_without_keys_everybody_comes_in() -> None:
    async with client(Starlette(routes=[Route("/x", who)]), Access()) as http:
        assert (await http.get("/x")).json() == ""
