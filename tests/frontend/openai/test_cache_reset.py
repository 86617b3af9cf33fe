"""POST /reset_prefix_cache: there where the frontend was told so, for those who may, and answered once all is done."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Reason, Unavailable
from octavo.frontend.scheduler.pool import CacheResets, SchedulerPool
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_scheduler import FakeScheduler

RESET = "/reset_prefix_cache"


@pytest.fixture
def config(config: FrontendConfig, request: pytest.FixtureRequest, tmp_path: Path) -> FrontendConfig:
    keys = write_keys(tmp_path / "keys.json") if "key" in request.node.name else None
    return dataclasses.replace(config, api_keys=keys, enable_cache_reset="not_there" not in request.node.name)


@pytest.fixture
async def ready(frontend: FrontendServer, scheduler: FakeScheduler, eventually: Any) -> FakeScheduler:
    await eventually(lambda: frontend.generation.ready)
    return scheduler


async def test_all_is_reset_and_the_answer_says_what_went(ready: FakeScheduler, http: httpx.AsyncClient) -> None:
    ready.pinned = {"system": [1, 2]}
    answer = await http.post(RESET)
    assert answer.status_code == 200
    assert answer.json() == {"dropped_blocks": 12, "blocks_in_use": 3, "pinned_prefixes": 1}
    assert ready.resets == [None]


@pytest.mark.parametrize(
    ("query", "salt"),
    [
        ("?cache_salt=s", "s"),
        # What vLLM's clients send is so in any case: running requests are in nobody's way, and there is no other cache.
        ("?reset_running_requests=true&reset_external=false", None),
    ],
)
async def test_parameters_are_those_of_vllm_and_a_salt(
    ready: FakeScheduler, http: httpx.AsyncClient, query: str, salt: str | None
) -> None:
    assert (await http.post(RESET + query)).status_code == 200
    assert ready.resets == [salt]


@pytest.mark.parametrize("query", ["?cache_salt=", f"?cache_salt={'s' * 257}", "?salt=s"])
async def test_a_call_that_cannot_be_meant_resets_nothing(
    ready: FakeScheduler, http: httpx.AsyncClient, query: str
) -> None:
    answer = await http.post(RESET + query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_parameter")
    assert not ready.resets


async def test_it_is_not_there_unless_the_frontend_was_told(ready: FakeScheduler, http: httpx.AsyncClient) -> None:
    assert (await http.post(RESET)).status_code == 404
    assert not ready.resets


async def test_with_keys_only_a_trusted_one_resets(ready: FakeScheduler, http: httpx.AsyncClient) -> None:
    for headers in ({}, {"authorization": bearer("alice")}):
        assert (await http.post(RESET, headers=headers)).status_code == 401
    assert not ready.resets
    assert (await http.post(RESET, headers={"authorization": bearer("gateway")})).status_code == 200
    assert ready.resets == [None]


async def test_nobody_else_s_page_resets(ready: FakeScheduler, http: httpx.AsyncClient) -> None:
    assert (await http.post(RESET, headers={"origin": "https://elsewhere.example"})).status_code == 403
    assert (await http.get(RESET)).status_code == 405
    assert not ready.resets


async def test_a_scheduler_that_does_not_answer_is_told_of(
    ready: FakeScheduler, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, frontend: FrontendServer
) -> None:
    monkeypatch.setattr("octavo.frontend.stream.generation._RESET_S", 0.2)
    ready.answers_resets = False
    answer = await http.post(RESET)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "scheduler_unreachable")
    assert "0 of 1 schedulers" in answer.json()["error"]["message"]
    # Nobody waits for the answer any more.
    assert not frontend.scheduler.links[0].cache_resets


@contextlib.asynccontextmanager
async def running_pool(schedulers: Sequence[FakeScheduler]) -> AsyncIterator[SchedulerPool]:
    """A frontend's links to several schedulers."""
    fingerprint = schedulers[0].model.fingerprint
    pool = SchedulerPool([scheduler.endpoint for scheduler in schedulers], fingerprint, grace_s=30.0)
    task = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_cell_is_reset_and_one_that_is_away_is_told_of(
    fake_scheduler: FakeScheduler, tmp_path: Path, eventually: Any
) -> None:
    other = FakeScheduler(f"ipc://{tmp_path}/other.sock", fake_scheduler.model)
    async with fake_scheduler.serving(), running_pool([fake_scheduler, other]) as pool:
        await eventually(lambda: pool.links[0].epoch is not None)
        with pytest.raises(Unavailable) as refused:
            await pool.reset_prefix_caches("s", 0.2)
        assert refused.value.reason is Reason.SCHEDULER_UNREACHABLE
        assert "1 of 2 schedulers" in str(refused.value)
        async with other.serving():
            await eventually(lambda: pool.links[1].epoch is not None)
            assert await pool.reset_prefix_caches("s", 60.0) == CacheResets(24, 6, 0)
    assert (fake_scheduler.resets, other.resets) == (["s", "s"], ["s"])
