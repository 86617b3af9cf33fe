import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model

StartStack = Callable[..., Stack]


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "byte-model"
    write_byte_model(directory)
    return directory


@pytest.fixture
def new_stack(byte_model: Path) -> Iterator[StartStack]:
    """Makes stacks of fake workers (or of `model`) in directories short enough for unix sockets."""
    with ExitStack() as cleanup:

        def make(model: Path = byte_model, **environment: str) -> Stack:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
            return cleanup.enter_context(Stack(model, directory, {"OCTAVO_DEVICE": "fake", **environment}))

        yield make
