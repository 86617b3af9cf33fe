"""Whatever a client sends: the right error, no process dead, no block held."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import zmq
from google.protobuf.empty_pb2 import Empty

from octavo.runtime.transport.sockets import connect_dealer
from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import Stack, token_request
from octavo.v1 import generation_pb2

pytestmark = pytest.mark.system

NAN, INF = float("nan"), float("inf")
TOKENS = generation_pb2.TokenIds(ids=[1, 2, 3])


@pytest.fixture(scope="module")
def stack(byte_model: Path) -> Iterator[Stack]:
    environment = {"OCTAVO_DEVICE": "fake", "OCTAVO_NUM_BLOCKS": "64", "OCTAVO_FAKE_STEP_MS": "5"}
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(byte_model, Path(directory), environment) as stack,
    ):
        yield stack.start_all()


@pytest.fixture(autouse=True)
def harmless(stack: Stack) -> Iterator[None]:
    """After every test all processes live, nothing is held, and the next request is served."""
    yield
    stack.assert_alive()
    stack.wait_idle()
    assert len(stack.generate(token_request([1, 2, 3], 4)).token_ids) == 4


def request(**fields: object) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**{"token_ids": TOKENS, **fields})  # type: ignore[arg-type]


def sampling(**fields: float) -> generation_pb2.GenerateRequest:
    return request(sampling=generation_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def stopping(**fields: object) -> generation_pb2.GenerateRequest:
    return request(stopping=generation_pb2.StoppingCriteria(**fields))  # type: ignore[arg-type]


def with_unknown_field() -> generation_pb2.GenerateRequest:
    # Field 12 of a newer client, which this server has no name for.
    return generation_pb2.GenerateRequest.FromString(request().SerializeToString() + b"\x62\x04lora")


INVALID = grpc.StatusCode.INVALID_ARGUMENT
BAD = {
    "no prompt": (generation_pb2.GenerateRequest(), INVALID, "BAD_PARAMETER"),
    "empty text": (generation_pb2.GenerateRequest(text=""), INVALID, "BAD_PARAMETER"),
    "empty ids": (request(token_ids=generation_pb2.TokenIds()), INVALID, "BAD_PARAMETER"),
    "empty chat": (generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt()), INVALID, "BAD_PARAMETER"),
    "prompt too long": (request(token_ids=generation_pb2.TokenIds(ids=[1] * 2048)), INVALID, "PROMPT_TOO_LONG"),
    "long text": (generation_pb2.GenerateRequest(text="x" * 3_000_000), INVALID, "PROMPT_TOO_LONG"),
    "token id out of range": (request(token_ids=generation_pb2.TokenIds(ids=[300])), INVALID, "BAD_PARAMETER"),
    "beyond the context": (stopping(max_new_tokens=2046), INVALID, "BAD_PARAMETER"),
    "beyond the cache": (stopping(max_new_tokens=1100), INVALID, "NEVER_FITS_KV"),
    "zero new tokens": (stopping(max_new_tokens=0), INVALID, "BAD_PARAMETER"),
    "negative temperature": (sampling(temperature=-0.5), INVALID, "BAD_PARAMETER"),
    "NaN temperature": (sampling(temperature=NAN), INVALID, "BAD_PARAMETER"),
    "infinite temperature": (sampling(temperature=INF), INVALID, "BAD_PARAMETER"),
    "NaN top_p": (sampling(top_p=NAN), INVALID, "BAD_PARAMETER"),
    "zero top_p": (sampling(top_p=0.0), INVALID, "BAD_PARAMETER"),
    "top_p above one": (sampling(top_p=1.5), INVALID, "BAD_PARAMETER"),
    "huge top_k": (sampling(top_k=2**32 - 1), INVALID, "BAD_PARAMETER"),
    "empty stop string": (stopping(stop_strings=[""]), INVALID, "BAD_PARAMETER"),
    "nine stop strings": (stopping(stop_strings=list("abcdefghi")), INVALID, "BAD_PARAMETER"),
    "stop id out of range": (stopping(stop_token_ids=[2**31]), INVALID, "BAD_PARAMETER"),
    "too many stop ids": (stopping(stop_token_ids=list(range(200))), INVALID, "BAD_PARAMETER"),
    "request id too long": (request(request_id="x" * 200), INVALID, "BAD_PARAMETER"),
    "unprintable request id": (request(request_id="a\nb"), INVALID, "BAD_PARAMETER"),
    "unknown model": (request(model="gpt-17"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    "unknown field": (with_unknown_field(), grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_its_error(stack: Stack, name: str) -> None:
    bad, code, reason = BAD[name]
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(bad)
    assert (error.value.code(), reason_of(error.value)) == (code, reason), error.value.details()
    # No headers went out, so a client library may retry what is worth it.
    assert not error.value.initial_metadata()  # type: ignore[attr-defined]


def test_a_message_of_ten_megabytes_is_refused_before_it_is_read(stack: Stack) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(generation_pb2.GenerateRequest(text="x" * 10_000_000))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_running_requests_id_is_taken_and_its_stream_goes_on(stack: Stack) -> None:
    first = stack.stream(token_request([5, 6], 900, request_id="twice"))
    next(first)
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(token_request([5, 6], 40, request_id="twice"))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert reason_of(error.value) == "DUPLICATE_ID"
    while len(next(first).delta.token_ids) == 0:
        pass
    first.cancel()


def test_a_client_that_goes_in_mid_stream_leaves_nothing(stack: Stack) -> None:
    stream = stack.stream(token_request([5, 6], 900))
    for _ in range(3):
        next(stream)
    assert stack.load().running == 1
    stream.cancel()
    stack.wait_idle()


def test_a_deadline_ends_the_request(stack: Stack) -> None:
    # Of so many tokens in steps of five milliseconds it would need more than four seconds.
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(token_request([5, 6], 900), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff" * 4]
)
def test_garbage_on_the_public_port_is_shrugged_off(stack: Stack, garbage: bytes) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(stack.address.removeprefix("unix:"))
            client.sendall(garbage)


def test_an_unknown_method_is_unimplemented(stack: Stack) -> None:
    method = stack.channel.unary_unary(
        "/octavo.v1.GenerationService/Divine",
        request_serializer=Empty.SerializeToString,
        response_deserializer=Empty.FromString,
    )
    with pytest.raises(grpc.RpcError) as error:
        method(Empty(), timeout=60)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["frontends", "workers"])
def test_garbage_on_the_inner_sockets_is_counted_and_dropped(stack: Stack, name: str) -> None:
    before = stack.load().dropped_messages
    with zmq.Context() as context, connect_dealer(context, f"ipc://{stack.directory}/{name}.sock") as dealer:
        for frames in ([b""], [b"\xc1\xff"], [b"a", b"b", b"c"], [b"\xdd\xff\xff\xff\xff"]):
            dealer.send_multipart(frames)
        stack.wait_for(lambda: stack.load().dropped_messages == before + 4)


def test_raw_bytes_on_the_inner_sockets_are_shrugged_off(stack: Stack) -> None:
    for name in ("frontends", "workers"):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"{stack.directory}/{name}.sock")
                client.sendall(b"\xff" * 4096)
