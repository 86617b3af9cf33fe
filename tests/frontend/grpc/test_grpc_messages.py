"""Long messages to gRPC clients are written off the event loop, so that other calls go on."""

import pytest

from octavo.frontend.grpc.messages import shown_fields, write, written
from octavo.frontend.request.events import FEW_LOGPROBS, Emitted, RequestStarted
from octavo.testing.fakes.watched import Watched
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import Logprobs


@pytest.mark.parametrize("more", [0, 1])
async def test_many_logprobs_of_a_prompt_are_written_off_the_event_loop(more: int) -> None:
    logprobs = Watched([Logprobs(-0.5, 1, [7], [-0.5])] * (FEW_LOGPROBS + more))
    started = RequestStarted("r", "m", [4] * (len(logprobs) + 1), 0, logprobs)
    rest = shown_fields(pb.ResponseOptions()), lambda token_id: b"x"
    message = await written(Emitted(1, started), *rest)
    assert len(message.started.prompt_logprobs) == len(logprobs)
    assert message == write(Emitted(1, started), *rest)
    assert logprobs.apart == {bool(more), False}
