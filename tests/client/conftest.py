from collections.abc import Iterator

import pytest

from octavo.testing.fakes.fake_frontend import FakeFrontend, script, serving


@pytest.fixture
def frontend() -> FakeFrontend:
    fake = FakeFrontend()
    fake.script = script("one ", "two ", "three")
    return fake


@pytest.fixture
def address(frontend: FakeFrontend) -> Iterator[str]:
    with serving(frontend) as address:
        yield address
