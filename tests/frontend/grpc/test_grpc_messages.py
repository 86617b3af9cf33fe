"""Events as messages to gRPC clients: what they show, and that long ones are written off the event loop, so that other
calls go on."""

import pytest

from octavo.frontend.grpc.messages import shown_fields, write, written
from octavo.frontend.request.events import FEW_LOGPROBS, Emitted, RequestStarted, TextDelta
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


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"text", "token_ids", "logprobs"}, {"text": " a", "token_ids": [5], "logprobs": 1}),
        ({"text"}, {"text": " a"}),
        ({"token_ids"}, {"token_ids": [5]}),
        (set(), {}),
    ],
)
@pytest.mark.parametrize("index", [0, 3])
def test_a_delta_shows_what_was_asked_for_and_is_a_delta_all_the_same(
    index: int, shown: set[str], expected: dict[str, object]
) -> None:
    event = TextDelta(" a", [5], [Logprobs(-0.5, 1, [7], [-0.25])], index)
    response = pb.GenerateResponse.FromString(
        write(Emitted(9, event), shown, lambda token_id: bytes([token_id])).SerializeToString()
    )
    delta = response.delta
    assert (response.event_offset, response.WhichOneof("event"), delta.index) == (9, "delta", index)
    found = {"text": delta.text, "token_ids": list(delta.token_ids), "logprobs": len(delta.logprobs)}
    assert {name: value for name, value in found.items() if value} == expected
    for logprob in delta.logprobs:
        assert (logprob.id, logprob.logprob, logprob.rank, logprob.piece) == (5, -0.5, 1, b"\x05")
        assert [(each.id, each.logprob, each.piece) for each in logprob.top] == [(7, -0.25, b"\x07")]
