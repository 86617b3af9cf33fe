import random
from typing import Any

import msgspec
import pytest

from octavo.wire.base import MAX_TOKENS
from octavo.wire.codec import (
    WireError,
    decode_from_frontend,
    decode_from_worker,
    decode_to_frontend,
    decode_to_worker,
    encode,
)
from octavo.wire.requests import (
    Abort,
    Delta,
    Deltas,
    FinishReason,
    FrontendHello,
    FrontendWelcome,
    Lease,
    Refused,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    Request,
    ServiceStatus,
    StatusChanged,
    Submit,
    Unregistered,
)
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import (
    Heartbeat,
    ModelInfo,
    SampledToken,
    SequenceStart,
    SequenceWork,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)

EPOCH = 2**64 - 1
SAMPLING = SamplingParams(0.7, 40, 0.9, EPOCH, 16, [2])
MODEL = ModelInfo("model", "fingerprint", "float32", 1000, 2048)
STATUS = ServiceStatus(1, MODEL, 4096)
REQUEST = Request("r", 1, False, "fingerprint", [1, 2, 3], [4], SAMPLING, 250)
DELTA = Delta("r", 1, 0, 4, EPOCH, [7], FinishReason.STOP, 2, 16)

DIRECTIONS: dict[str, tuple[Any, list[Any]]] = {
    "from frontend": (
        decode_from_frontend,
        [FrontendHello(1, 5), Submit(EPOCH, REQUEST), Renew(EPOCH, [Lease("r", 1)]), Abort(EPOCH, ["r"])],
    ),
    "to frontend": (
        decode_to_frontend,
        [
            FrontendWelcome(EPOCH, STATUS),
            StatusChanged(EPOCH, ServiceStatus(0, None, 0)),
            Renewed(EPOCH, [Lease("r", 1)], STATUS),
            Deltas(EPOCH, [DELTA]),
            Rejected(EPOCH, "r", 1, RejectReason.NEVER_FITS_KV, "too long"),
            Refused("old"),
            Unregistered(EPOCH),
        ],
    ),
    "from worker": (
        decode_from_worker,
        [
            WorkerHello(1, "w", 3, MODEL, "cpu", 0, 1, 100, 16, 4096),
            StepResult(EPOCH, 3, 1, StepOutcome.DONE, [SampledToken(1, 5)], StepTimes(1, 2, 3), ""),
            Heartbeat(EPOCH, 3, 1),
            WorkerGoodbye(EPOCH, 3),
        ],
    ),
    "to worker": (
        decode_to_worker,
        [
            WorkerWelcome(EPOCH),
            WorkerRefused("no"),
            WorkerUnregistered(EPOCH),
            StepPlan(EPOCH, 3, 1, 0, [9], [SequenceStart(1, 0, [1, 2], [], 1, SAMPLING)], [SequenceWork(1, 2, [0])]),
        ],
    ),
}
MESSAGES = [(decode, message) for decode, messages in DIRECTIONS.values() for message in messages]


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_comes_back_as_it_was_sent(decode: Any, message: Any) -> None:
    assert decode(encode(message)) == message


def test_a_steady_decode_plan_of_64_sequences_is_a_few_hundred_bytes() -> None:
    plan = StepPlan(EPOCH, EPOCH, 1000, 999, [], [], [SequenceWork(5000 + i, 1, []) for i in range(64)])
    assert len(encode(plan)) < 600


@pytest.mark.parametrize(
    ("decode", "wrong"),
    [
        (decode_from_frontend, [*msgspec.to_builtins(Abort(1, [])), "unknown field"]),
        (decode_from_frontend, ["Abort", 1]),
        (decode_from_frontend, ["Nonsense", 1]),
        (decode_from_frontend, ["WorkerWelcome", 1]),
        (decode_from_frontend, ["Abort", -1, []]),
        (decode_from_frontend, ["Abort", 1, [""]]),
        (decode_from_frontend, ["Abort", 1, ["x" * 257]]),
        (decode_from_frontend, ["Abort", "1", []]),
        (decode_to_worker, ["StepPlan", 1, 1, 0, 0, [], [], []]),
        (decode_to_worker, ["StepPlan", 1, 1, 1, 0, [], [], [[1, 0, []]]]),
        (decode_to_worker, ["StepPlan", 1, 1, 1, 0, [], [], [[1, 1, [-1]]]]),
        (decode_from_worker, ["StepResult", 1, 1, 1, "unheard of", [], [0, 0, 0], ""]),
        (decode_from_worker, ["StepResult", 1, 1, 1, "done", [[1, 2**31]], [0, 0, 0], ""]),
    ],
)
def test_what_is_out_of_shape_or_range_is_refused(decode: Any, wrong: list[Any]) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("max_tokens", 0),
        ("max_tokens", MAX_TOKENS + 1),
        ("seed", -1),
        ("stop_token_ids", [0] * 129),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    request = msgspec.structs.replace(REQUEST, sampling=msgspec.structs.replace(SAMPLING, **{field: value}))
    with pytest.raises(WireError):
        decode_from_frontend(encode(Submit(1, request)))


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x91" * 100_000, b"\xa4\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"],
    ids=["empty", "reserved byte", "http", "deep nesting", "invalid utf-8", "four billion elements"],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_garbage_is_a_wire_error_and_nothing_else(direction: str, frame: bytes) -> None:
    with pytest.raises(WireError):
        DIRECTIONS[direction][0](frame)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mutated_messages_decode_or_raise_a_wire_error(direction: str) -> None:
    decode, messages = DIRECTIONS[direction]
    frames = [encode(message) for message in messages]
    rng = random.Random(7)
    refused = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            decode(bytes(frame[: rng.randint(1, len(frame))]))
        except WireError:
            refused += 1
    assert refused > 10_000
