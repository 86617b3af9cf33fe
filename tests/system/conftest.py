import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.testbed.stack import GenerateStream, Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import admin_pb2 as pb
from octavo.v1.generation_pb2 import GenerateRequest

StartStack = Callable[..., Stack]


def all_at_once(stack: Stack, requests: Sequence[GenerateRequest]) -> list[GenerateStream]:
    """Streams of which none begins before all have come to the scheduler, whose only worker is worker-0."""
    stack.admin.CordonWorker(pb.CordonWorkerRequest(worker_id="worker-0"))
    streams = [stack.stream(request) for request in requests]
    stack.wait_for(lambda: stack.load().waiting == len(requests))
    stack.admin.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id="worker-0"))
    return streams


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "byte-model"
    write_byte_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte model with random weights, of a size that the native kernels take."""
    from transformers import AutoConfig

    from octavo.testbed.models import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_byte_model(directory)
    write_tiny_model(directory, AutoConfig.from_pretrained(directory, head_dim=16))
    return directory


@pytest.fixture
def new_stack(byte_model: Path) -> Iterator[StartStack]:
    """Makes stacks of fake workers (or of `model`) in directories short enough for unix sockets."""
    with ExitStack() as cleanup:

        def make(model: Path = byte_model, **environment: str) -> Stack:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
            # On a busy machine a process takes its time to start.
            patience = {"OCTAVO_SCHEDULER_GRACE": "300", "OCTAVO_WORKER_GRACE": "300"}
            return cleanup.enter_context(Stack(model, directory, {"OCTAVO_DEVICE": "fake", **patience, **environment}))

        yield make
