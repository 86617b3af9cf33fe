"""The HTTP port of a real frontend in this process, and an Admin service that says what a test puts into it."""

import dataclasses
from collections.abc import AsyncIterator

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_admin import FakeAdmin, fake_admin


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0")


@pytest.fixture
async def http(frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.http_port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
async def admin() -> AsyncIterator[FakeAdmin]:
    async with fake_admin() as admin:
        yield admin
