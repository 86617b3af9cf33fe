"""Every bad request gets its own clear error, and leaves nothing behind."""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import grpc
import pytest

from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect, reason_of, retry_delay_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import RejectReason

Code = grpc.StatusCode


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))


def stopped(**stopping: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", stopping=pb.StoppingCriteria(**stopping))


def chatted(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


def crowded(count: int) -> pb.GenerateRequest:
    """So many empty messages, as bytes: to make them one by one takes a second."""
    message = chatted(("user", "")).chat.SerializeToString()
    return pb.GenerateRequest(chat=pb.ChatPrompt.FromString(message * count))


def with_unknown_field(request: pb.GenerateRequest, inner: str = "") -> pb.GenerateRequest:
    # Field 100, a varint of 1.
    target = getattr(request, inner) if inner else request
    target.MergeFromString(b"\xa0\x06\x01")
    return request


BAD: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "BAD_PARAMETER", "one of text, token_ids and chat"),
    "empty text": (pb.GenerateRequest(text=""), "BAD_PARAMETER", "prompt is empty"),
    "no token ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "BAD_PARAMETER", "prompt is empty"),
    "no messages": (chatted(), "BAD_PARAMETER", "prompt is empty"),
    "unknown role": (chatted(("<|im_end|>", "hi")), "BAD_PARAMETER", "must be one of system"),
    "negative temperature": (sampled(temperature=-0.1), "BAD_PARAMETER", "temperature is -0.1"),
    "NaN temperature": (sampled(temperature=math.nan), "BAD_PARAMETER", "temperature is nan"),
    "infinite temperature": (sampled(temperature=math.inf), "BAD_PARAMETER", "temperature is inf"),
    "huge temperature": (sampled(temperature=100.5), "BAD_PARAMETER", "between 0 (greedy) and 100"),
    "top_p of 0": (sampled(top_p=0.0), "BAD_PARAMETER", "top_p is 0.0"),
    "top_p above 1": (sampled(top_p=1.01), "BAD_PARAMETER", "top_p is 1.01"),
    "NaN top_p": (sampled(top_p=math.nan), "BAD_PARAMETER", "top_p is nan"),
    "huge top_k": (sampled(top_k=2**31), "BAD_PARAMETER", "top_k is 2147483648"),
    "no new tokens": (stopped(max_new_tokens=0), "BAD_PARAMETER", "max_new_tokens is 0"),
    "too many new tokens": (stopped(max_new_tokens=508), "BAD_PARAMETER", "leave 507 of the context's 512"),
    "endless new tokens": (stopped(max_new_tokens=2**32 - 1), "BAD_PARAMETER", "4294967295"),
    "empty stop string": (stopped(stop_strings=[""]), "BAD_PARAMETER", "1 to 256 bytes"),
    "long stop string": (stopped(stop_strings=["é" * 129]), "BAD_PARAMETER", "258 bytes"),
    "nine stop strings": (stopped(stop_strings=["x"] * 9), "BAD_PARAMETER", "repeated 9 times"),
    "stop id outside": (stopped(stop_token_ids=[258]), "BAD_PARAMETER", "the vocabulary ends at 257"),
    "too many stop ids": (stopped(stop_token_ids=range(129)), "BAD_PARAMETER", "at most 128"),
    "prompt id outside": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2**32 - 1])),
        "BAD_PARAMETER",
        "4294967295, but the vocabulary ends at 257",
    ),
    "long id": (pb.GenerateRequest(text="x", request_id="x" * 129), "BAD_PARAMETER", "at most 128 printable"),
    "unprintable id": (pb.GenerateRequest(text="x", request_id="a\nb"), "BAD_PARAMETER", "printable"),
    "prompt fills the context": (
        pb.GenerateRequest(text="x" * 512),
        "PROMPT_TOO_LONG",
        "512 tokens and the context 512",
    ),
    "prompt not worth tokenizing": (pb.GenerateRequest(text="x" * 5121), "PROMPT_TOO_LONG", "5121 bytes"),
    "chat not worth tokenizing": (chatted(("user", "x" * 5113)), "PROMPT_TOO_LONG", "5121 bytes"),
    "many empty messages": (crowded(641), "PROMPT_TOO_LONG", "5128 bytes"),
    "half a million messages": (crowded(500_000), "BAD_PARAMETER", "at most 4096"),
    "four million token ids": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 4_000_000)),
        "PROMPT_TOO_LONG",
        "4000000 tokens and the context 512",
    ),
    "two million stop strings": (stopped(stop_strings=[""] * 2_000_000), "BAD_PARAMETER", "repeated 2000000 times"),
    "four million stop ids": (stopped(stop_token_ids=[1] * 4_000_000), "BAD_PARAMETER", "repeated 4000000 times"),
}


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


@pytest.mark.parametrize("name", BAD)
async def test_invalid(name: str, scheduler: FakeScheduler, frontend: FrontendServer, stub: Any) -> None:
    request, reason, words = BAD[name]
    error = await failure(stub.Generate(request))
    assert (error.code(), reason_of(error)) == (Code.INVALID_ARGUMENT, reason)
    assert words in (error.details() or "")
    assert retry_delay_of(error) is None
    assert scheduler.submitted == []
    assert frontend.generation.num_running == 0


async def test_what_is_too_much_is_refused_without_a_look_at_each_part(scheduler: FakeScheduler, stub: Any) -> None:
    """Or all other clients would wait for as long as that takes: the lines of the frontend that run do not grow."""
    few, many = 5_000, 500_000
    executed = []
    for number in (few, many):
        with counted_lines() as lines:
            assert "at most 4096" in ((await failure(stub.Generate(crowded(number)))).details() or "")
        executed.append(lines.total())
    assert executed[1] - executed[0] < (many - few) / 10


@contextlib.contextmanager
def counted_lines() -> Iterator[Counter[str]]:
    """Counts the lines of the frontend that this thread executes, by file."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "/octavo/frontend/" not in frame.f_code.co_filename:
            return None
        counts[frame.f_code.co_filename] += 1
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    yield counts
    sys.settrace(former)


async def test_at_the_limits(scheduler: FakeScheduler, stub: Any) -> None:
    stopping = pb.StoppingCriteria(max_new_tokens=1, stop_strings=["é" * 128, *"abcdefg"], stop_token_ids=[*range(127)])
    sampling = pb.SamplingParams(temperature=100.0, top_p=1.0, top_k=2**31 - 1, seed=0)
    request = pb.GenerateRequest(text="x" * 511, request_id="y" * 128, sampling=sampling, stopping=stopping)
    assert await collect(stub.Generate(request))


async def test_a_model_not_served(scheduler: FakeScheduler, stub: Any) -> None:
    error = await failure(stub.Generate(pb.GenerateRequest(text="x", model="../secret")))
    assert (error.code(), reason_of(error)) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "'byte-model'" in (error.details() or "")


@pytest.mark.parametrize("inner", ["", "sampling", "stopping", "response", "chat"])
async def test_unknown_fields(scheduler: FakeScheduler, stub: Any, inner: str) -> None:
    request = chatted(("user", "x"))
    request.sampling.seed = request.stopping.max_new_tokens = 1
    request.response.text = True
    error = await failure(stub.Generate(with_unknown_field(request, inner)))
    assert (error.code(), reason_of(error)) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
    assert "field 100 of octavo.v1." in (error.details() or "")


async def test_an_unknown_field_deep_inside(scheduler: FakeScheduler, stub: Any) -> None:
    request = chatted(("user", "x"), ("user", "y"))
    request.chat.messages[1].MergeFromString(b"\xa0\x06\x01")
    error = await failure(stub.Generate(request))
    assert "field 100 of octavo.v1.ChatMessage" in (error.details() or "")


async def test_megabytes_of_unknown_fields_are_not_listed(scheduler: FakeScheduler, stub: Any) -> None:
    error = await failure(stub.Generate(pb.GenerateRequest.FromString(b"\xa0\x06\x01" * 1_000_000)))
    assert (error.code(), reason_of(error)) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
    assert "3000000 bytes of fields" in (error.details() or "")


async def test_what_the_scheduler_rejects(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.rejection = RejectReason.NEVER_FITS_KV
    call = stub.Generate(stopped(max_new_tokens=1))
    error = await failure(call)
    assert (error.code(), reason_of(error)) == (Code.INVALID_ARGUMENT, "NEVER_FITS_KV")
    assert error.details() == "because the test says so"
    assert frontend.generation.num_running == 0
    scheduler.renewals.clear()
    await eventually(lambda: scheduler.renewals != [])
    assert scheduler.renewals[0] == []


@pytest.mark.parametrize("num_replicas", [0])
async def test_an_answer_that_cannot_be_is_never_counted_as_work(scheduler: FakeScheduler, stub: Any) -> None:
    """Nor does it wait for a worker: everybody else would be refused meanwhile for want of room."""
    error = await failure(stub.Generate(stopped(max_new_tokens=2**32 - 1)))
    assert (error.code(), reason_of(error)) == (Code.INVALID_ARGUMENT, "BAD_PARAMETER")
