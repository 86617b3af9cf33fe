from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.testing.simulation.campaign import fake_model


@pytest.fixture(scope="session")
def directory() -> Iterator[Path]:
    """The fake model of all runs."""
    with fake_model() as directory:
        yield directory
