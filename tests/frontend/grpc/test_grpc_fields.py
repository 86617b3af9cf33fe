"""Fields of octavo.v1 become the frontend's own types, or are refused."""

import dataclasses
import json
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from msgspec import structs

from octavo.frontend.errors import InvalidRequest
from octavo.frontend.grpc.requests import read_chat, read_request
from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.generation import Generation
from octavo.testbed.grpc_calls import collect, ids_of, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.requests import NoticeKind

WHOLE_CHAT = pb.ChatPrompt(
    messages=[
        pb.ChatMessage(role="user", content="weather?", name="Ann"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="look", arguments_json='{"at": "Ulm"}')]),
        pb.ChatMessage(role="tool", content="rain", tool_call_id="1"),
    ],
    tools=[pb.Tool(name="look", description="Looks.", parameters_json='{"type": "object"}')],
    template_variables_json='{"enable_thinking": false}',
)


def ask(**fields: Any) -> pb.GenerateRequest:
    fields.setdefault("text", "hello")
    fields.setdefault("stopping", pb.StoppingCriteria(max_new_tokens=4))
    return pb.GenerateRequest(**fields)


def constrained(**constraint: Any) -> pb.GenerateRequest:
    return ask(constraint=pb.OutputConstraint(**constraint))


def chatted(**fields: Any) -> pb.GenerateRequest:
    fields.setdefault("messages", [pb.ChatMessage(role="user", content="hi")])
    return pb.GenerateRequest(chat=pb.ChatPrompt(**fields))


def said(**fields: Any) -> pb.GenerateRequest:
    return chatted(messages=[pb.ChatMessage(**fields)])


def with_tool(**fields: Any) -> pb.GenerateRequest:
    return chatted(tools=[pb.Tool(**fields)])


def scheduled(**fields: Any) -> pb.GenerateRequest:
    return ask(scheduling=pb.SchedulingHints(**fields))


BAD: dict[str, tuple[pb.GenerateRequest, str]] = {
    "a prediction of nothing": (ask(prediction=pb.Prediction()), "one of text and token_ids must be set"),
    "an empty constraint": (constrained(), "one of json_object, json_schema"),
    "no JSON object": (constrained(json_object=False), "json_object is false"),
    "an empty schema": (constrained(json_schema=""), "json_schema is empty"),
    "an empty regex": (constrained(regex=""), "regex is empty"),
    "an empty grammar": (constrained(grammar=""), "grammar is empty"),
    "no choices": (constrained(choice=pb.ChoiceList()), "choice is empty"),
    "empty choices": (constrained(choice=pb.ChoiceList(choices=["", ""])), "choice is empty"),
    "too many choices": (constrained(choice=pb.ChoiceList(choices=["x"] * 1025)), "repeated 1025 times"),
    "large choices": (constrained(choice=pb.ChoiceList(choices=["x" * 65536, "y"])), "65537 bytes long"),
    "a large schema": (constrained(json_schema="é" * 32769), "65538 bytes long"),
    "a constraint without an end": (
        ask(constraint=pb.OutputConstraint(regex="a+"), stopping=pb.StoppingCriteria(ignore_eos=True)),
        "ignore_eos is set together with a constraint",
    ),
    "too many tools": (chatted(tools=[pb.Tool(name="f")] * 129), "repeated 129 times"),
    "a tool without a name": (with_tool(name=""), "chat.tools.name is ''"),
    "a tool with a strange name": (with_tool(name="a b"), "chat.tools.name is 'a b'"),
    "a tool with a long name": (with_tool(name="f" * 129), "1 to 128 of the characters"),
    "large parameters": (with_tool(name="f", parameters_json=" " * 65537), "65537 bytes long"),
    "parameters that are no JSON": (with_tool(name="f", parameters_json="{"), "not a JSON object"),
    "a long name": (said(role="user", content="hi", name="x" * 257), "chat.messages.name is 257 characters"),
    "a name that cannot be printed": (said(role="user", content="hi", name="\n"), "at most 256 printable"),
    "an answer of no tool": (said(role="user", content="hi", tool_call_id="1"), "only a tool answers a call"),
    "a user that calls tools": (said(role="user", tool_calls=[pb.ToolCall(name="f")]), "only an assistant calls tools"),
    "too many calls": (said(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 129), "repeated 129 times"),
    "large arguments": (
        said(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments_json=" " * 65537)]),
        "65537 bytes long",
    ),
    "variables that are no JSON": (chatted(template_variables_json="{x}"), "template_variables_json is no JSON object"),
    "variables that are no object": (chatted(template_variables_json="[]"), "template_variables_json is no JSON"),
    "deep variables": (chatted(template_variables_json='{"a":' + "[" * 9000), "template_variables_json is no JSON"),
    "large variables": (chatted(template_variables_json=" " * 16385), "16385 bytes long"),
    "no time to wait": (scheduled(max_queue_time=Duration()), "max_queue_s is 0.0"),
    "a negative time to wait": (scheduled(max_queue_time=Duration(seconds=-1)), "max_queue_s is -1.0"),
    "too long a wait": (scheduled(max_queue_time=Duration(seconds=86401)), "max_queue_s is 86401.0"),
    "a negative grace": (scheduled(detach_grace=Duration(nanos=-5)), "detach_grace_s is -5e-09"),
    "too long a grace": (scheduled(detach_grace=Duration(seconds=2**40)), "between 0 (not kept) and 86400 seconds"),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_refused(scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, case: str) -> None:
    request, message = BAD[case]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAMETER")
    assert message in (caught.value.details() or "")
    assert scheduler.submitted == []
    assert frontend.generation.num_running == 0


async def test_a_prediction_is_handed_on_and_what_became_of_it_comes_back(scheduler: FakeScheduler, stub: Any) -> None:
    counts = {"drafted": 9, "accepted": 7, "accepted_predictions": 4, "rejected_predictions": 1}
    scheduler.tamper = lambda delta: [structs.replace(delta, **counts)]
    ids = [71, 72]
    for prediction in (pb.Prediction(text="hi"), pb.Prediction(token_ids=pb.TokenIds(ids=ids))):
        *_, last = await collect(stub.Generate(ask(prediction=prediction)))
        assert scheduler.submitted[-1].predicted_token_ids == ids
        usage = last.usage
        assert (usage.drafted_tokens, usage.accepted_tokens) == (9, 7)
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (4, 1)


def test_a_whole_chat_is_read() -> None:
    assert read_chat(WHOLE_CHAT) == Chat(
        messages=(
            ChatMessage("user", "weather?", "Ann"),
            ChatMessage("assistant", "", tool_calls=(ToolCall("1", "look", '{"at": "Ulm"}'),)),
            ChatMessage("tool", "rain", tool_call_id="1"),
        ),
        tools=(Tool("look", "Looks.", '{"type": "object"}'),),
        template_variables={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": True}, (True, True)),
    ],
)
def test_a_message_that_is_continued_is_followed_by_none(fields: dict[str, Any], expected: tuple[bool, bool]) -> None:
    chat = read_chat(pb.ChatPrompt(**fields))
    assert (chat.add_generation_prompt, chat.continue_final_message) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (constrained(json_object=True), Constraint(ConstraintKind.JSON_OBJECT)),
        (constrained(json_schema="{}"), Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        (constrained(regex="a+"), Constraint(ConstraintKind.REGEX, "a+")),
        (constrained(grammar="x"), Constraint(ConstraintKind.GRAMMAR, "x")),
        (constrained(choice={"choices": ["a", ""]}), Constraint(ConstraintKind.CHOICE, choices=("a", ""))),
        (ask(), None),
    ],
)
def test_every_constraint_is_read(message: pb.GenerateRequest, expected: Constraint | None) -> None:
    assert read_request(message, {}).constraint == expected


def test_an_unknown_constraint_is_no_constraint() -> None:
    with pytest.raises(InvalidRequest, match="one of json_object"):
        read_request(constrained(), {})


async def test_a_constraint_reaches_the_workers_as_a_grammar(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compiled(self: object, constraint: Constraint, around: str) -> str:
        return f"grammar of {constraint.text}"

    monkeypatch.setattr("octavo.frontend.text.pool.TextPool.compile", compiled)
    await collect(stub.Generate(constrained(regex="a+")))
    assert scheduler.submitted[0].sampling.grammar == "grammar of a+"


async def test_a_grammar_that_no_message_holds_is_refused(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compiled(self: object, constraint: Constraint, around: str) -> str:
        return "x" * ((1 << 18) + 1)

    monkeypatch.setattr("octavo.frontend.text.pool.TextPool.compile", compiled)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(constrained(regex="a+")))
    assert reason_of(caught.value) == "BAD_CONSTRAINT"


async def test_the_time_to_wait_and_the_trace_go_with_the_request(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Traced:
        traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    asked = []

    def start_span(name: str, traceparent: str = "", **attributes: Any) -> Traced:
        asked.append((name, traceparent))
        return Traced()

    monkeypatch.setattr("octavo.runtime.telemetry.tracing.start_span", start_span)
    request = scheduled(max_queue_time=Duration(seconds=2, nanos=500_000_000))
    await collect(stub.Generate(request, metadata=(("traceparent", "theirs"),)))
    assert asked == [("request", "theirs")]
    assert scheduler.submitted[0].traceparent == Traced.traceparent
    assert scheduler.submitted[0].max_queue_ms == 2500


async def test_the_call_names_the_request_unless_the_message_does(scheduler: FakeScheduler, stub: Any) -> None:
    metadata = (("x-request-id", "theirs"),)
    for request, expected in ((ask(), "theirs"), (ask(request_id="mine"), "mine")):
        call = stub.Generate(request, metadata=metadata)
        started = (await collect(call))[0].started
        assert started.request_id == expected
        told = {str(key): value for key, value in await call.initial_metadata()}
        assert (told["x-request-id"], told["x-prompt-tokens"]) == (expected, "5")


async def test_headers_come_with_the_first_event_and_never_before(
    scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 0
    call = stub.Generate(ask(request_id="é"))
    await eventually(lambda: len(scheduler.running) == 1)
    await scheduler.tell("é", NoticeKind.QUEUED, queue_position=1)
    told = {str(key): value for key, value in await call.initial_metadata()}
    # Metadata has no room for such a letter.
    assert "x-request-id" not in told
    assert told["x-prompt-tokens"] == "5"
    scheduler.hold_after = 1 << 30
    assert len(ids_of(await collect(call))) == 4


async def test_a_refused_call_has_no_headers(scheduler: FakeScheduler, stub: Any) -> None:
    call = stub.Generate(ask(text=""))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert "x-request-id" not in {str(key) for key, _ in caught.value.initial_metadata()}


async def test_logprobs_have_the_bytes_of_their_tokens(scheduler: FakeScheduler, frontend: Any, stub: Any) -> None:
    request = ask()
    request.response.top_logprobs = 2
    request.response.prompt_logprobs = 1
    responses = await collect(stub.Generate(request))
    tokens = [token for response in responses for token in response.delta.logprobs]
    piece = frontend.generation.tokenizer.piece
    assert [token.piece for token in tokens] == [piece(token.id) for token in tokens]
    assert b"".join(token.piece for token in tokens).decode() == "".join(r.delta.text for r in responses)
    assert [candidate.piece for candidate in tokens[0].top] == [piece(0), piece(1)]
    assert [token.piece for token in responses[0].started.prompt_logprobs] == [b"e", b"l", b"l", b"o"]


async def test_the_model_goes_by_the_name_that_was_asked_for(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend.generation, "model_names", ("byte-model", "gpt"))
    for asked, expected in (("", "byte-model"), ("gpt", "gpt"), ("byte-model", "byte-model")):
        assert (await collect(stub.Generate(ask(model=asked))))[0].started.model == expected
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [model.id for model in models] == ["byte-model", "gpt"]
    assert isinstance(frontend.generation, Generation)


async def test_a_text_may_be_tokenized_without_what_is_added_to_it(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = []

    async def encode(self: object, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        added.append(add_special_tokens)
        return [1]

    monkeypatch.setattr("octavo.frontend.text.pool.TextPool.encode", encode)
    for asked in (None, True, False):
        await stub.Tokenize(pb.TokenizeRequest(text="x", add_special_tokens=asked))
    assert added == [True, True, False]


async def test_a_chat_has_the_special_tokens_of_its_template(scheduler: FakeScheduler, stub: Any) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    with pytest.raises(grpc.aio.AioRpcError, match="add_special_tokens is set together with a chat"):
        await stub.Tokenize(pb.TokenizeRequest(chat=chat, add_special_tokens=False))


async def test_keys_of_one_tenant_do_not_reach_the_requests_of_another(
    scheduler: FakeScheduler, config: Any, tmp_path: Any, eventually: Any
) -> None:
    keys = tmp_path / "keys.json"
    tenants = {
        name: {"keys": [f"sk-{name}-0123456789abcdef0123456789"], "trusted": name == "ops"}
        for name in ("a", "b", "ops")
    }
    keys.write_text(json.dumps({"tenants": tenants}))
    scheduler.hold_after = 2

    def bearing(name: str) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer sk-{name}-0123456789abcdef0123456789"),)

    async with (
        running_frontend(dataclasses.replace(config, api_keys=keys)) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        call = stub.Generate(ask(request_id="mine"), metadata=bearing("a"))
        await anext(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Attach(pb.AttachRequest(request_id="mine"), metadata=bearing("b"), timeout=60))
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        for name, aborted in (("b", []), ("ops", ["mine"])):
            answer = await stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=bearing(name))
            assert list(answer.aborted) == aborted
        with pytest.raises(grpc.aio.AioRpcError, match="was aborted by its id"):
            await collect(call)
        assert scheduler.submitted[0].tenant == "a"
