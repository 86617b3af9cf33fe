"""The client against a server that plays a script and loses connections where it is told to."""

import itertools
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from octavo.client import (
    AuthenticationError,
    Chat,
    Client,
    DeadlineError,
    Delta,
    Embedding,
    EmbedOptions,
    Message,
    Notice,
    OctavoError,
    OverloadedError,
    RequestError,
    RequestOptions,
    RetryPolicy,
    SamplingParams,
    Started,
    TextPair,
    UnavailableError,
    Usage,
)
from octavo.testing.fakes.fake_frontend import FakeFrontend, script, serving, status
from octavo.v1 import generation_pb2 as pb

AT_ONCE = RetryPolicy(first_pause_s=0.0)


@pytest.fixture
def client(address: str) -> Client:
    return Client(address, retries=AT_ONCE)


def test_generate_gives_the_whole_answer(client: Client) -> None:
    result = client.generate("hi", SamplingParams(max_tokens=5, stop="STOP"))
    assert result.text == "one two three"
    [completion] = result.completions
    assert bytes(completion.token_ids).decode() == result.text
    assert (completion.finish_reason, completion.stop_reason, completion.logprobs) == ("stop", "STOP", None)
    assert (result.prompt, result.request_id, result.seed, result.usage.prompt_tokens) == ("hi", "r", 7, 3)


def test_stream_gives_the_events_as_they_are(client: Client) -> None:
    events = list(client.stream("hi"))
    assert events[0] == Notice(1, "queued", 2)
    assert isinstance(events[1], Started)
    assert [event.text for event in events if isinstance(event, Delta)] == ["one ", "two ", "three"]
    assert isinstance(events[-1], Usage)


def test_what_is_asked_for_is_what_is_sent(client: Client, frontend: FakeFrontend) -> None:
    chat = Chat([Message("system", "be brief"), {"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    params = SamplingParams(n=2, seed=5, stop="X", stop_token_ids=[3], logprobs=1, logit_bias={4: -1.5}, top_k=0)
    options = RequestOptions(request_id="mine", priority=-2, tenant="t", cache_salt="s", max_queue_time=1.5)
    client.generate(chat, params, options)
    [request] = frontend.generated
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.sampling.num_sequences, request.sampling.seed, request.sampling.logit_bias[4]) == (2, 5, -1.5)
    assert (request.sampling.HasField("top_k"), request.sampling.HasField("top_p")) == (True, False)
    assert (list(request.stopping.stop_strings), list(request.stopping.stop_token_ids)) == (["X"], [3])
    assert (request.request_id, request.scheduling.priority, request.cache.salt) == ("mine", -2, "s")
    assert request.scheduling.max_queue_time.ToMilliseconds() == 1500
    assert request.scheduling.detach_grace.ToSeconds() == 30
    assert not request.response.incremental


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (SamplingParams(json_object=True), "json_object", True),
        (SamplingParams(json_schema={"type": "null"}), "json_schema", '{"type": "null"}'),
        (SamplingParams(json_schema="{}"), "json_schema", "{}"),
        (SamplingParams(regex="a+"), "regex", "a+"),
        (SamplingParams(choice=["a", "b"]), "choice", pb.ChoiceList(choices=["a", "b"])),
        (SamplingParams(grammar="start: X"), "grammar", "start: X"),
    ],
)
def test_constraints_are_sent(
    client: Client, frontend: FakeFrontend, params: SamplingParams, field: str, value: object
) -> None:
    client.generate([1, 2], params)
    constraint = frontend.generated[0].constraint
    assert (constraint.WhichOneof("constraint"), getattr(constraint, field)) == (field, value)


def test_two_constraints_at_once_are_refused_where_they_are_written() -> None:
    with pytest.raises(ValueError, match="json_object and regex cannot be had together"):
        SamplingParams(json_object=True, regex="a")


@pytest.mark.parametrize(
    "message", [{"content": "no role"}, {"role": "user", "contents": ""}, {"role": "user", "content": [{"type": "x"}]}]
)
def test_messages_that_are_none_are_refused_before_they_are_sent(client: Client, message: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"role|contents|type"):
        client.chat([message])


def test_a_value_of_the_wrong_type_is_a_value_error(client: Client) -> None:
    with pytest.raises(ValueError, match="wrong type"):
        client.generate("hi", SamplingParams(temperature="hot"))  # type: ignore[arg-type]


def test_the_other_calls(client: Client) -> None:
    assert client.tokenize("hi") == [104, 105]
    assert client.tokenize(Chat([Message("user", "hi")])) == [1, 2]
    assert client.detokenize([104, 105]) == "hi"
    assert [(model.id, model.max_model_len, model.ready) for model in client.models()] == [("m", 64, True)]
    assert client.abort("a", "b") == ["a", "b"]


def test_outputs_of_texts(client: Client, frontend: FakeFrontend) -> None:
    assert client.embed("a text") == [Embedding([0.0, 0.5], 3)]
    found = client.embed(
        ["a text", [1, 2], TextPair("a query", "a document")],
        EmbedOptions(dimensions=2, truncate_to=0, prompt_name="query", priority=-3, max_queue_time=1.5, timeout=100),
    )
    assert [each.values[0] for each in found] == [0.0, 1.0, 2.0]
    first, second = frontend.embedded
    assert first == pb.EmbedRequest(inputs=[pb.EmbedInput(text="a text")], add_special_tokens=True)
    assert second == pb.EmbedRequest(
        inputs=[
            pb.EmbedInput(text="a text"),
            pb.EmbedInput(token_ids=pb.TokenIds(ids=[1, 2])),
            pb.EmbedInput(pair=pb.TextPair(first="a query", second="a document")),
        ],
        dimensions=2,
        truncate_to=0,
        prompt_name="query",
        add_special_tokens=True,
        priority=-3,
        max_queue_time=Duration(seconds=1, nanos=500_000_000),
    )
    assert 50 < (frontend.remaining_s or 0) < 101
    with pytest.raises(ValueError, match="not a request that can be sent"):
        client.embed([[1, -2]])


def test_the_key_and_the_deadline_go_with_every_call(address: str, frontend: FakeFrontend) -> None:
    with Client(address, api_key="sk-1", timeout=5000) as client:
        client.generate("hi", options=RequestOptions(timeout=2000))
        assert frontend.metadata["authorization"] == "Bearer sk-1"
        assert 1000 < (frontend.remaining_s or 0) < 3000
        client.tokenize("hi")
        assert frontend.metadata["authorization"] == "Bearer sk-1"
        assert 4000 < (frontend.remaining_s or 0) < 6000


@given(st.lists(st.integers(0, 7), max_size=8))
def test_no_event_is_lost_and_none_comes_twice_wherever_connections_break(losses: list[int]) -> None:
    frontend = FakeFrontend()
    frontend.script = script("a", "b", "c")
    # Two losses in a row with nothing received yet are as many as a client puts up with.
    frontend.losses.extend(max(loss, 1) for loss in losses)
    with serving(frontend) as address, Client(address, retries=AT_ONCE) as client:
        offsets = [event.offset for event in client.stream("hi")]
    assert offsets == list(range(1, 8))
    attached = [after for name, after in frontend.calls if name == "attach"]
    assert attached == sorted(set(attached))


def test_a_loss_after_the_last_event_loses_nothing(client: Client, frontend: FakeFrontend) -> None:
    frontend.losses.append(7)
    assert [event.offset for event in client.stream("hi")] == list(range(1, 8))
    assert [name for name, _ in frontend.calls] == ["generate"]


def test_a_request_whose_call_was_lost_before_anything_came_is_attached_to(
    client: Client, frontend: FakeFrontend
) -> None:
    frontend.losses.append(0)
    assert client.generate("hi").text == "one two three"
    assert frontend.calls == [("generate", 0), ("attach", 0)]
    assert frontend.attached[0].request_id == frontend.generated[0].request_id != ""


def test_a_request_that_the_server_never_had_is_sent_again(client: Client, frontend: FakeFrontend) -> None:
    frontend.losses.append(0)
    frontend.forgets = True
    assert client.generate("hi").text == "one two three"
    assert [name for name, _ in frontend.calls] == ["generate", "attach", "generate"]


def test_a_stream_that_the_server_forgot_ends_and_an_answer_that_nobody_saw_is_made_anew(
    client: Client, frontend: FakeFrontend
) -> None:
    frontend.forgets = True
    frontend.losses.append(4)
    stream = client.stream("hi")
    assert len(list(itertools.islice(stream, 4))) == 4
    with pytest.raises(UnavailableError, match="lost after event 4") as raised:
        next(stream)
    assert raised.value.reason == "STREAM_LOST"
    assert list(stream) == []
    frontend.losses.append(4)
    assert client.generate("hi").text == "one two three"


def test_without_a_grace_time_nothing_is_attached_to(address: str, frontend: FakeFrontend) -> None:
    frontend.losses.append(4)
    with Client(address, detach_grace=0, retries=AT_ONCE) as client:
        with pytest.raises(UnavailableError, match="lost after event 4"):
            list(client.stream("hi"))
        assert not frontend.generated[0].scheduling.HasField("detach_grace")
    assert [name for name, _ in frontend.calls] == ["generate"]


def test_a_closed_stream_is_aborted_and_a_complete_one_is_not(client: Client, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    with client.stream("hi") as stream:
        next(stream)
    assert frontend.aborted == [stream.request_id]
    assert list(stream) == []
    frontend.go_on.set()
    with client.stream("hi") as stream:
        list(stream)
    assert len(frontend.aborted) == 1


def test_refusals_are_tried_again_when_the_server_says(client: Client, frontend: FakeFrontend) -> None:
    full = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 0.001, queued="9"),
    )
    frontend.refusals.extend([full, full])
    stream = client.stream("hi")
    named = stream.request_id
    assert len(list(stream)) == 7
    # The server may keep what it refused for as long as the grace time.
    assert frontend.generated[0].request_id == stream.request_id != named
    frontend.refusals.extend([full, full])
    assert client.tokenize("hi") == [104, 105]
    frontend.refusals.extend([full, full, full])
    with pytest.raises(OverloadedError, match="refused with QUEUE_FULL") as raised:
        client.generate("hi")
    error = raised.value
    assert (error.code, error.reason, error.retry_after_s, error.metadata) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        0.001,
        {"queued": "9"},
    )
    assert isinstance(error.__cause__, grpc.RpcError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, RequestError),
        (grpc.StatusCode.UNIMPLEMENTED, RequestError),
        (grpc.StatusCode.UNAUTHENTICATED, AuthenticationError),
    ],
)
def test_other_errors_are_told_at_once(
    client: Client, frontend: FakeFrontend, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    frontend.refusals.append((code, status(code, "BAD_PARAMETER")))
    with pytest.raises(kind):
        client.generate("hi")
    assert len(frontend.calls) == 1


def test_details_that_are_garbage_leave_the_error_as_it_is(client: Client, frontend: FakeFrontend) -> None:
    class Garbage:
        message = "no"

        def SerializeToString(self) -> bytes:
            return b"\x1a\x05\xff\xff\xff\xff\xff"

    frontend.refusals.append((grpc.StatusCode.INVALID_ARGUMENT, Garbage()))
    with pytest.raises(RequestError) as raised:
        client.generate("hi")
    assert (str(raised.value), raised.value.reason) == ("no", "")


def test_a_server_that_takes_too_long_is_a_deadline_error(client: Client, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    with pytest.raises(DeadlineError):
        client.generate("hi", options=RequestOptions(timeout=0.2))


def test_nobody_at_the_address_is_said_soon(tmp_path: object) -> None:
    with Client(f"unix:{tmp_path}/nobody.sock", retries=AT_ONCE) as client, pytest.raises(UnavailableError):
        client.generate("hi")


def test_a_client_that_is_closed_ends_its_streams(client: Client, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    stream = client.stream("hi")
    next(stream)
    client.close()
    with pytest.raises(OctavoError):
        next(stream)
    assert list(stream) == []


def test_a_stream_that_is_closed_by_another_thread_ends(client: Client, frontend: FakeFrontend) -> None:
    frontend.go_on.clear()
    stream = client.stream("hi")
    next(stream)
    closing = threading.Timer(0.05, stream.close)
    closing.start()
    assert list(stream) == []
    closing.join()
    assert frontend.aborted == [stream.request_id]
    assert [name for name, _ in frontend.calls] == ["generate"]
