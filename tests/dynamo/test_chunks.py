"""Events as Dynamo's chunks, and the errors of a cell as its exceptions."""

import grpc
import pytest

from octavo.client.errors import make_error
from octavo.client.events import Candidate, Delta, Event, Finished, Notice, Started, TokenLogprobs, Usage
from octavo.dynamo.chunks import Chunk, Chunks, exception_name

STARTED = Started(1, "r", "m", prompt_tokens=3, seed=7)
USAGE = Usage(9, 3, 4, 2, 0, 0, 0.1, 0.2)
LIKELY, CHOSEN = Candidate(5, -0.1, b"a"), Candidate(6, -2.5, b"\xc3")


def written(*events: Event | None) -> list[Chunk]:
    chunks = Chunks()
    return [chunk for event in events for chunk in chunks.of(event)]


def test_tokens_come_as_they_come_and_the_end_with_the_usage() -> None:
    events = (Notice(1, "queued"), STARTED, Delta(2, 0, "", (5, 6)), None, Delta(3, 0, "", ()), Delta(4, 0, "", (7,)))
    assert written(*events, Finished(8, 0, "length"), USAGE) == [
        {"index": 0, "token_ids": [5, 6]},
        {"index": 0, "token_ids": [7]},
        {
            "index": 0,
            "token_ids": [],
            "finish_reason": "length",
            "completion_usage": {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        },
    ]


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length"), ("other", "stop")])
def test_every_end_has_a_name_that_dynamo_knows(reason: str, told: str) -> None:
    *_, last = written(STARTED, Finished(8, 0, reason, "STOP"), USAGE)  # type: ignore[arg-type]
    assert last["finish_reason"] == told


def test_logprobs_list_the_likeliest_tokens_and_the_one_chosen() -> None:
    unlikely = TokenLogprobs(6, -2.5, rank=9, top=(LIKELY,), piece=CHOSEN.piece)
    [chunk] = written(Delta(2, 0, "", (5, 6), (TokenLogprobs(5, -0.1, 1, (LIKELY,), b"a"), unlikely)))
    likely = {"rank": 1, "token_id": 5, "token": "a", "logprob": -0.1, "bytes": [97]}
    chosen = {"rank": 9, "token_id": 6, "token": "�", "logprob": -2.5, "bytes": [0xC3]}
    assert chunk["log_probs"] == [-0.1, -2.5]
    assert chunk["top_logprobs"] == [[likely], [likely, chosen]]


def test_logprobs_of_the_prompt_come_with_the_end() -> None:
    told = Started(1, "r", "m", 2, 7, (TokenLogprobs(6, -2.5, 9, (LIKELY,), CHOSEN.piece),))
    *_, last = written(told, Delta(2, 0, "", (5,)), Finished(8, 0, "stop"), USAGE)
    likely = {"logprob": -0.1, "rank": 1, "decoded_token": "a"}
    chosen = {"logprob": -2.5, "rank": 9, "decoded_token": "�"}
    assert last["engine_data"] == {"prompt_logprobs": [None, {"5": likely, "6": chosen}]}


@pytest.mark.parametrize(
    ("code", "reason", "retry_after_s", "name"),
    [
        # They go on elsewhere.
        (grpc.StatusCode.UNAVAILABLE, "", None, "EngineShutdown"),
        (grpc.StatusCode.INTERNAL, "", None, "EngineShutdown"),
        (grpc.StatusCode.CANCELLED, "", None, "EngineShutdown"),
        (grpc.StatusCode.UNAVAILABLE, "NO_WORKER", 1.0, "EngineShutdown"),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0, "EngineShutdown"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0, "CannotConnect"),
        # They would end the same way elsewhere.
        (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAMETER", None, "InvalidArgument"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", None, "InvalidArgument"),
        (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD", None, "InvalidArgument"),
        (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", None, "InvalidArgument"),
        (grpc.StatusCode.CANCELLED, "ABORTED", None, "Cancelled"),
        # Or bring the next cell down.
        (grpc.StatusCode.INTERNAL, "QUARANTINED", None, "Unknown"),
        (grpc.StatusCode.INTERNAL, "STEP_FAILED", None, "Unknown"),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", None, "Unknown"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", None, "Unknown"),
    ],
)
def test_what_another_cell_could_answer_goes_on_there_and_nothing_else(
    code: grpc.StatusCode, reason: str, retry_after_s: float | None, name: str
) -> None:
    assert exception_name(make_error(code, "refused", reason, retry_after_s)) == name
