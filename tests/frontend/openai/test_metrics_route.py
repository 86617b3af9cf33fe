"""GET /metrics of the port that clients use: all of it for those who may know it, and the load for endpoint pickers."""

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.metrics import LOAD_METRICS
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import BlockUse, ServiceLoad


@dataclasses.dataclass
class Port:
    """Who asks for keys there, and whether the load is for everybody."""

    asks_for_keys: bool
    is_public: bool


@pytest.fixture
def port() -> Port:
    return Port(asks_for_keys=False, is_public=False)


@pytest.fixture
def config(config: FrontendConfig, port: Port, tmp_path: Path) -> FrontendConfig:
    keys = write_keys(tmp_path / "keys.json") if port.asks_for_keys else None
    return dataclasses.replace(config, api_keys=keys, public_load_metrics=port.is_public)


@pytest.fixture(autouse=True)
def lasting_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep the fake scheduler from its next word for as long as a load counts as fresh."""
    monkeypatch.setattr("octavo.frontend.scheduler.client._LOAD_LASTS_S", 60.0)


def ports(**which: bool) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("port", [Port(**which)], ids=[str(which)])


def read(answer: httpx.Response) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every family that Prometheus' own reader finds, by its name."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(answer.text)
    }


async def test_an_endpoint_picker_finds_the_load_of_the_cell(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    scheduler.load = ServiceLoad(3, 5, [BlockUse(16, 200, 50)])
    await eventually(lambda: frontend.generation.ready)
    await scheduler.set_replicas(1)
    await eventually(lambda: frontend.scheduler.links[0].service_load == scheduler.load)
    found = read(await http.get("/metrics"))
    model = {"model_name": "byte-model"}
    assert found["vllm:num_requests_waiting"] == [(model, 3)]
    assert found["vllm:num_requests_running"] == [(model, 5)]
    assert found["vllm:kv_cache_usage_perc"] == [(model, 0.25)]
    assert found["vllm:cache_config_info"] == [({"block_size": "16", "num_gpu_blocks": "200"}, 1)]
    # Beside all that the process tells of itself.
    assert {"octavo_requests_arrived", "octavo_cell_ready", "octavo_tenant_work_tokens"} <= found.keys()
    assert found["octavo_cell_status_age_seconds"][0][1] < 60


@ports(asks_for_keys=True, is_public=True)
async def test_without_a_key_the_load_alone_may_be_public(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    await eventually(lambda: frontend.scheduler.links[0].service_load is not None)
    for headers in ({}, {"authorization": bearer("alice")}):
        assert read(await http.get("/metrics", headers=headers)).keys() == LOAD_METRICS
    assert read(await http.get("/metrics", headers={"authorization": bearer("gateway")})).keys() > LOAD_METRICS


@ports(asks_for_keys=True, is_public=True)
@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/metrics", {"authorization": "Bearer wrong"}),
        ("GET", "/metrics", {"x-api-key": ""}),
        ("POST", "/metrics", {}),
        ("GET", "/metrics/", {}),
        ("GET", "/load", {}),
        ("GET", "/v1/models", {}),
    ],
)
async def test_public_load_opens_nothing_else(
    scheduler: FakeScheduler, http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]
) -> None:
    assert (await http.request(method, path, headers=headers)).status_code == 401


@ports(asks_for_keys=True, is_public=False)
async def test_with_keys_the_load_is_as_closed_as_all_else_unless_told_otherwise(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    for headers in ({}, {"authorization": bearer("alice")}):
        assert (await http.get("/metrics", headers=headers)).status_code == 401


@ports(asks_for_keys=False, is_public=True)
async def test_where_nobody_is_asked_for_a_key_nothing_is_hidden(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    await eventually(lambda: frontend.scheduler.links[0].service_load is not None)
    assert read(await http.get("/metrics")).keys() > LOAD_METRICS


async def test_a_scheduler_that_falls_silent_takes_the_load_with_it(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    await eventually(lambda: frontend.scheduler.links[0].service_load is not None)
    scheduler.is_frozen = True
    await eventually(lambda: frontend.scheduler.links[0].service_load is None)
    assert not read(await http.get("/metrics")).keys() & LOAD_METRICS
    scheduler.is_frozen = False
    await eventually(lambda: frontend.scheduler.links[0].service_load is not None)
    assert read(await http.get("/metrics")).keys() > LOAD_METRICS
