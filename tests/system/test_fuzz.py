"""Some thousands of bad messages in all, on every surface; `python -m octavo.chaos.fuzz` sends any number."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.chaos.fuzz.surfaces import ENVIRONMENT, SURFACES
from octavo.chaos.fuzz.target import run
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.depth import deep

pytestmark = pytest.mark.system

MESSAGES = {"grpc": 800, "engine": 400, "http": 800, "zmq": 1000, "admin": 200, "soak": 60, "metrics": 40}
ATTACKS = [(surface, name) for surface in MESSAGES for name in SURFACES[surface]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("model") / "byte-model"
    write_byte_model(model, max_model_len=512)
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(model, Path(directory), ENVIRONMENT) as stack,
    ):
        yield stack.start_all()


def test_every_surface_is_attacked() -> None:
    assert MESSAGES.keys() == SURFACES.keys()


# An eighth of the messages, and all.
@pytest.mark.parametrize("part", [8, *deep(1)])
@pytest.mark.parametrize(("surface", "name"), ATTACKS)
def test_bad_messages_do_no_harm(stack: Stack, surface: str, name: str, part: int) -> None:
    messages = max(1, MESSAGES[surface] // len(SURFACES[surface]) // part)
    report = run(stack, SURFACES[surface][name], messages, seed=part % 8)
    assert not report.faults, report
    assert sum(report.answers.values()) > 0
