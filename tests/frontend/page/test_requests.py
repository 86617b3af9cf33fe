"""GET and DELETE /requests/{id}: where a request stands, and its end, for whoever may ask for them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from octavo.frontend.api import explanations
from octavo.frontend.api.explanations import Explainer
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import NotFound, Overloaded
from octavo.frontend.request.request import Caller, GenerationRequest
from octavo.frontend.scheduler.pool import Listing
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_admin import FakeAdmin
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import admin_pb2 as pb

Eventually = Callable[[Callable[[], Any]], Awaitable[Any]]


@pytest.fixture
def config(config: FrontendConfig, admin: FakeAdmin) -> FrontendConfig:
    return dataclasses.replace(config, scheduler_admin=admin.address)


@pytest.fixture
async def locked(config: FrontendConfig, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a frontend that asks for keys."""
    async with running_frontend(dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"))) as (
        server,
        _,
    ):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            yield client


@pytest.fixture
async def hold(scheduler: FakeScheduler, eventually: Eventually) -> Any:
    """Sends requests that get no token; each is there when the call returns."""
    scheduler.hold_after = 0
    tasks = []

    async def send(http: httpx.AsyncClient, request_id: str, key: str = "") -> "asyncio.Task[httpx.Response]":
        number, body = len(scheduler.submitted), {"prompt": "x", "max_tokens": 8, "request_id": request_id}
        headers = {"authorization": bearer(key)} if key else {}
        task = asyncio.create_task(http.post("/v1/completions", json={"model": "byte-model", **body}, headers=headers))
        tasks.append(task)
        await eventually(lambda: len(scheduler.submitted) > number)
        return task

    yield send
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ask(
    http: httpx.AsyncClient, method: str, request_id: str, key: str = "", **params: str
) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": bearer(key)} if key else {}
    answer = await http.request(method, f"/requests/{quote(request_id, safe='')}", headers=headers, params=params)
    return answer.status_code, answer.json()


def explanation(request_id: str, frontend_id: str = "f0", **fields: Any) -> pb.Explanation:
    status = pb.RequestStatus(request_id=request_id, frontend_id=frontend_id, state=pb.REQUEST_STATE_WAITING)
    return pb.Explanation(status=status, **fields)


def own_id(scheduler: FakeScheduler) -> str:
    return f"{scheduler.frontend_id:016x}"


# -- abort ------------------------------------------------------------------------------------------------------------


async def test_an_abort_ends_a_request(
    http: httpx.AsyncClient, scheduler: FakeScheduler, hold: Any, eventually: Eventually
) -> None:
    task = await hold(http, "mine")
    assert await ask(http, "DELETE", "mine") == (200, {"request_id": "mine", "aborted": True})
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "aborted")
    await eventually(lambda: scheduler.aborted == ["mine"])


async def test_what_does_not_run_cannot_be_aborted(http: httpx.AsyncClient, hold: Any) -> None:
    task = await hold(http, "mine")
    await ask(http, "DELETE", "mine")
    await task
    for request_id in ("mine", "other", "x" * 5000, "a/b?c#d\0\u2028"):
        status, body = await ask(http, "DELETE", request_id)
        assert (status, body["error"]["code"]) == (404, "request_not_found")
        assert len(body["error"]["message"]) < 300


async def test_an_id_may_hold_whatever_a_path_gives_a_meaning(http: httpx.AsyncClient, hold: Any) -> None:
    name = "a/b?c=d#e%2f/../é"
    task = await hold(http, name)
    assert (await ask(http, "DELETE", name))[0] == 200
    assert (await task).status_code == 409


async def test_a_tenant_aborts_its_own_alone(
    locked: httpx.AsyncClient, scheduler: FakeScheduler, hold: Any, eventually: Eventually
) -> None:
    await hold(locked, "hers", "alice")
    first, second = await hold(locked, "same", "alice"), await hold(locked, "same", "bob")
    assert (await ask(locked, "DELETE", "hers", "bob"))[0] == 404
    # Nor by what the scheduler lists.
    assert (await ask(locked, "DELETE", "hers", "bob", frontend=own_id(scheduler)))[0] == 404
    assert (await ask(locked, "DELETE", "same", "bob"))[0] == 200
    assert (await second).status_code == 409
    await eventually(lambda: scheduler.running == {"hers", "same"})
    assert not first.done()


async def test_the_trusted_abort_what_the_scheduler_lists(
    locked: httpx.AsyncClient, scheduler: FakeScheduler, hold: Any
) -> None:
    """Two tenants have requests of one id, which the scheduler tells apart."""
    first, second = await hold(locked, "same", "alice"), await hold(locked, "same", "bob")
    listed = scheduler.submitted[-1].request_id
    assert listed != "same"
    assert (await ask(locked, "DELETE", listed, "gateway", frontend="00"))[0] == 404
    assert (await ask(locked, "DELETE", listed, "gateway", frontend=own_id(scheduler)))[0] == 200
    assert (await second).status_code == 409
    assert not first.done()
    assert (await ask(locked, "DELETE", "same", "gateway"))[0] == 200
    assert (await first).status_code == 409


async def test_an_abort_needs_no_admin_service(config: FrontendConfig, hold: Any) -> None:
    async with running_frontend(dataclasses.replace(config, scheduler_admin="")) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            task = await hold(http, "mine")
            status, body = await ask(http, "GET", "mine")
            assert (status, "--scheduler-admin" in body["error"]["message"]) == (503, True)
            assert (await ask(http, "DELETE", "mine"))[0] == 200
            await task


# -- who may call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_pages_of_other_sites_reach_no_request(
    http: httpx.AsyncClient, admin: FakeAdmin, scheduler: FakeScheduler, hold: Any, method: str
) -> None:
    await hold(http, "mine")
    foreign = {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    answer = await http.request(method, "/requests/mine", headers=foreign)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    assert (scheduler.running, admin.explained) == ({"mine"}, [])


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_without_a_key_there_is_neither(
    locked: httpx.AsyncClient, admin: FakeAdmin, scheduler: FakeScheduler, hold: Any, method: str
) -> None:
    await hold(locked, "mine", "alice")
    assert (await ask(locked, method, "mine"))[0] == 401
    assert (scheduler.running, admin.explained) == ({"mine"}, [])


async def test_another_method_is_told_which_there_are(http: httpx.AsyncClient) -> None:
    answer = await http.post("/requests/mine", json={})
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


# -- explain ----------------------------------------------------------------------------------------------------------


async def test_an_explanation_is_what_the_scheduler_says(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    obstacle = pb.Obstacle(worker_id="w0", kind=pb.Obstacle.KIND_KV_BLOCKS, needed=3, available=1)
    told = explanation("a", queue_position=2, ahead_request_ids=["b"], obstacles=[obstacle], step_ids=[7, 8])
    admin.explanations["a"] = [told, explanation("a", "f1", tokens_in_flight=4)]
    status, body = await ask(http, "GET", "a")
    first, second = body["explanations"]
    assert (status, first["state"], first["frontend_id"]) == (200, "waiting", "f0")
    assert (first["queue_position"], first["ahead"], first["steps"]) == (2, ["b"], 2)
    assert first["obstacles"] == [{"worker_id": "w0", "kind": "kv_blocks", "needed": 3, "available": 1}]
    assert (second["frontend_id"], second["tokens_in_flight"]) == ("f1", 4)
    _, body = await ask(http, "GET", "a", frontend="f1")
    assert [each["frontend_id"] for each in body["explanations"]] == ["f1"]
    status, body = await ask(http, "GET", "a", frontend="f2")
    assert (status, body["error"]["code"]) == (404, "request_not_found")


async def test_what_was_found_of_a_request_is_told_to_who_may_know_it(
    locked: httpx.AsyncClient, admin: FakeAdmin, scheduler: FakeScheduler, hold: Any
) -> None:
    await hold(locked, "mine", "alice")
    cache = pb.CacheLookup(tokens=9, device_tokens=4, reason=pb.CacheLookup.REASON_DIFFERS, position=6, other_token=0)
    admin.explanations["mine"] = [explanation("mine", own_id(scheduler), cache=cache)]
    _, body = await ask(locked, "GET", "mine", "alice")
    [told] = body["explanations"]
    assert (told["cache"]["reason"], told["cache"]["other_token"], told["cache"]["token"]) == ("differs", 0, None)
    assert (told["cache"]["device_tokens"], told["cache"]["evicted_s"]) == (4, None)
    await ask(locked, "GET", "mine", "gateway")
    assert admin.askers == ["alice", "gateway"]


async def test_a_request_that_the_scheduler_does_not_hold(http: httpx.AsyncClient) -> None:
    status, body = await ask(http, "GET", "nobody's")
    assert (status, body["error"]["code"]) == (404, "request_not_found")


async def test_a_tenant_is_told_of_its_own_alone(
    locked: httpx.AsyncClient, admin: FakeAdmin, scheduler: FakeScheduler, hold: Any
) -> None:
    """Neither of another tenant's request of the same id, here or at another frontend, nor which ones are ahead."""
    await hold(locked, "same", "alice")
    await hold(locked, "same", "bob")
    listed, own = scheduler.submitted[-1].request_id, own_id(scheduler)
    admin.explanations["same"] = [explanation("same", own, queue_position=1)]
    bobs = explanation(listed, own, queue_position=2, ahead_request_ids=["same"])
    admin.explanations[listed] = [explanation(listed, "f9"), bobs]
    status, body = await ask(locked, "GET", "same", "bob", frontend="f9")
    [told] = body["explanations"]
    assert (status, told["frontend_id"], told["request_id"]) == (200, own, listed)
    assert (told["queue_position"], told["ahead"]) == (2, [])
    assert admin.explained == [listed]


async def test_the_scheduler_is_not_asked_of_what_is_not_the_tenants(
    locked: httpx.AsyncClient, admin: FakeAdmin, hold: Any
) -> None:
    await hold(locked, "hers", "alice")
    admin.explanations = {name: [explanation(name)] for name in ("hers", "elsewhere")}
    for name in ("hers", "elsewhere"):
        status, body = await ask(locked, "GET", name, "bob")
        assert (status, body["error"]["code"]) == (404, "request_not_found")
    assert admin.explained == []
    assert (await ask(locked, "GET", "elsewhere", "gateway"))[0] == 200


async def test_a_tenants_request_that_another_frontend_has_is_not_its_own(
    locked: httpx.AsyncClient, admin: FakeAdmin, hold: Any
) -> None:
    await hold(locked, "mine", "alice")
    admin.explanations["mine"] = [explanation("mine", "f9")]
    status, body = await ask(locked, "GET", "mine", "alice")
    assert (status, body["error"]["code"]) == (404, "request_not_found")


async def test_a_request_that_is_kept_after_its_end_stands_nowhere(
    frontend: FrontendServer, scheduler: FakeScheduler
) -> None:
    """Its tenant may still attach to it; the scheduler may have another one of its id by now."""
    alice = Caller("alice", trusted=False)
    asked = GenerationRequest("x", request_id="mine", max_new_tokens=2, detach_grace_s=30)
    assert [event async for event in frontend.generation.generate(asked, alice)]
    assert frontend.generation.request_of("mine", alice)
    assert frontend.generation.listing_of("mine", alice) is None
    assert not frontend.generation.abort_listed(Listing(own_id(scheduler), "mine"))


async def test_a_scheduler_that_is_not_there(config: FrontendConfig) -> None:
    config = dataclasses.replace(config, scheduler_admin="unix:/nowhere/admin.sock")
    async with running_frontend(config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            status, body = await ask(http, "GET", "mine")
    assert (status, body["error"]["code"]) == (503, "scheduler_unreachable")


async def test_one_question_at_a_time_and_few_of_one_tenant(
    admin: FakeAdmin, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "_PAUSE_S", 0.0)
    admin.explanations["a"] = [explanation("a")]
    admin.may_explain.clear()
    explainer = Explainer(admin.address)
    waiting = [asyncio.create_task(explainer.explain("a", "alice")) for _ in range(4)]
    await eventually(lambda: admin.explained)
    with pytest.raises(Overloaded):
        await explainer.explain("a", "alice")
    waiting.append(asyncio.create_task(explainer.explain("a", "bob")))
    await asyncio.sleep(0)
    assert admin.explained == ["a"]
    admin.may_explain.set()
    assert [len(told) for told in await asyncio.gather(*waiting)] == [1] * 5
    # All are over: as many may wait again.
    assert len(await explainer.explain("a", "alice")) == 1


async def test_between_two_questions_the_scheduler_has_time_for_others(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "_PAUSE_S", 0.2)
    admin.explanations["a"] = [explanation("a")]
    explainer = Explainer(admin.address)
    for _ in range(2):
        await explainer.explain("a", "alice")
    # Nor does one that fails come cheaper.
    for _ in range(2):
        with pytest.raises(NotFound):
            await explainer.explain("b", "bob")
    gaps = [after - before for before, after in zip(admin.explained_at, admin.explained_at[1:], strict=False)]
    assert [gap >= 0.19 for gap in gaps] == [True] * 3, gaps
