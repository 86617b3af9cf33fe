"""vllm.grpc.engine.VllmEngine through the real frontend's port, with the messages of the package smg-grpc-proto."""

import asyncio
import hashlib
import importlib.util
import io
import json
import random
import zipfile
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.frontend.server import FrontendServer
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.frontend.vllm_engine.service import add_vllm_engine
from octavo.runtime.telemetry.tracing import Span
from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import RejectReason


@pytest.fixture
def engine(channel: grpc.aio.Channel) -> Any:
    return services.VllmEngineStub(channel)


def request(*token_ids: int, stream: bool = True, request_id: str = "", **sampling: Any) -> Any:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="never read", input_ids=token_ids or [1, 2, 3]),
        sampling_params=pb.SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling}),
        stream=stream,
    )


async def read(call: Any) -> tuple[list[Any], list[Any]]:
    """The chunks and the wholes of a call, checked to come in this order."""
    responses = [response async for response in call]
    kinds = [response.WhichOneof("response") for response in responses]
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert kinds == ["chunk"] * len(chunks) + ["complete"] * (len(kinds) - len(chunks))
    return chunks, [response.complete for response in responses[len(chunks) :]]


async def test_a_stream_is_chunks_and_then_the_whole(scheduler: FakeScheduler, engine: Any) -> None:
    scheduler.answer = lambda request, index: [10, 11, 12, 13]
    chunks, [complete] = await read(engine.Generate(request()))
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [10, 11, 12, 13]
    assert [chunk.completion_tokens for chunk in chunks][-1] == 4
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert list(complete.output_ids) == [10, 11, 12, 13]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 4)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_a_stream_there_is_a_whole_of_every_sequence(scheduler: FakeScheduler, engine: Any) -> None:
    scheduler.answer = lambda request, index: [10 + index] * 4
    chunks, complete = await read(engine.Generate(request(stream=False, n=2)))
    assert chunks == []
    assert [(c.index, list(c.output_ids)) for c in complete] == [(0, [10] * 4), (1, [11] * 4)]


async def test_the_chunks_of_several_sequences_say_whose_they_are(scheduler: FakeScheduler, engine: Any) -> None:
    scheduler.answer = lambda request, index: [10 + index] * 4
    chunks, complete = await read(engine.Generate(request(n=2)))
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token_id for chunk in own for token_id in chunk.token_ids] == [10 + index] * 4
    assert [c.index for c in complete] == [0, 1]


async def test_the_trace_of_the_gateway_goes_on(
    scheduler: FakeScheduler, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def start_span(name: str, traceparent: str = "", **attributes: Any) -> Any:
        asked.append((name, traceparent))
        return Mock(spec=Span, traceparent="ours")

    monkeypatch.setattr("octavo.runtime.telemetry.tracing.start_span", start_span)
    await read(engine.Generate(request(), metadata=(("traceparent", "theirs"),)))
    assert asked == [("request", "theirs")]
    assert scheduler.submitted[0].traceparent == "ours"


async def test_a_gateway_names_the_tenant_it_speaks_for(scheduler: FakeScheduler, engine: Any) -> None:
    await read(engine.Generate(request(), metadata=(("x-gateway-inference-fairness-id", "theirs"),)))
    assert scheduler.submitted[0].tenant == "theirs"


async def test_what_ended_a_sequence_is_said(scheduler: FakeScheduler, frontend: FrontendServer, engine: Any) -> None:
    tokenizer: ModelTokenizer = frontend.generation.tokenizer
    scheduler.answer = lambda request, index: tokenizer.encode("an STOP x")
    _, [complete] = await read(engine.Generate(request(max_tokens=9, stop=["STOP"])))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "STOP")
    scheduler.answer = lambda request, index: [10, 11, 12, 13]
    _, [complete] = await read(engine.Generate(request(stop_token_ids=[11])))
    assert (complete.finish_reason, complete.matched_token_id, list(complete.output_ids)) == ("stop", 11, [10, 11])
    scheduler.answer = lambda request, index: [10, END_TOKEN_ID, 12, 13]
    _, [complete] = await read(engine.Generate(request()))
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
    _, [complete] = await read(engine.Generate(request(ignore_eos=True)))
    assert complete.finish_reason == "length"


async def test_logprobs_are_told_where_asked_for(scheduler: FakeScheduler, engine: Any) -> None:
    scheduler.answer = lambda request, index: [9, 9, 9, 9]
    chunks, [complete] = await read(engine.Generate(request(logprobs=1)))
    assert list(complete.output_logprobs.token_ids) == [9] * 4
    assert len(complete.output_logprobs.token_logprobs) == 4
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[0]] * 4
    assert sum(len(chunk.output_logprobs.token_logprobs) for chunk in chunks) == 4
    assert not complete.HasField("input_logprobs")
    _, [complete] = await read(engine.Generate(request()))
    assert not complete.HasField("output_logprobs")


async def test_every_parameter_arrives(scheduler: FakeScheduler, engine: Any) -> None:
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "seed": 5,
        "logit_bias": {4: -1.5},
    }
    await read(engine.Generate(request(**params)))
    sampling = scheduler.submitted[0].sampling
    for name in params.keys() - {"logit_bias"}:
        assert getattr(sampling, name) == params[name], name
    assert sampling.max_tokens == 4
    assert dict(sampling.logit_bias) == {4: -1.5}


async def test_what_is_left_out_is_the_models_default(scheduler: FakeScheduler, engine: Any) -> None:
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]))
    scheduler.answer = lambda request, index: [END_TOKEN_ID]
    await read(engine.Generate(message))
    sampling = scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.0, 1.0, 1.0)
    assert sampling.max_tokens > 100


async def test_text_is_tokenized_here(scheduler: FakeScheduler, frontend: FrontendServer, engine: Any) -> None:
    await read(engine.Generate(pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=1))))
    assert scheduler.submitted[0].prompt_token_ids == frontend.generation.tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_transfer_params": pb.KvTransferParams(remote_host="h")}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling_params": pb.SamplingParams(structural_tag="x")}, "structural_tag"),
        ({"sampling_params": pb.SamplingParams(truncate_prompt_tokens=5)}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_had_is_refused(
    scheduler: FakeScheduler, engine: Any, fields: dict[str, Any], named: str
) -> None:
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]), **fields)
    with pytest.raises(grpc.aio.AioRpcError, match=named) as raised:
        await read(engine.Generate(message))
    assert (raised.value.code(), reason_of(raised.value)) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD")


async def test_fields_that_nobody_knows_are_refused(scheduler: FakeScheduler, channel: Any) -> None:
    generate = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
    with pytest.raises(grpc.aio.AioRpcError, match="field 100 of vllm"):
        async for _ in generate(request().SerializeToString() + b"\xa0\x06\x01"):
            pass


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        request(-1 % 2**32),
        request(temperature=-1.0),
        request(n=17),
        request(logprobs=-1),
        request(prompt_logprobs=21),
        request(seed=-1),
        request(logit_bias={-1: 1.0}),
        request(stop=["x"] * 9),
        request(*[1] * 600),
        request(max_tokens=0),
    ],
)
async def test_bad_requests_are_refused(scheduler: FakeScheduler, engine: Any, message: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(engine.Generate(message))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert scheduler.submitted == []


async def test_a_client_that_leaves_ends_its_request(
    scheduler: FakeScheduler, frontend: FrontendServer, engine: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    scheduler.hold_after = 1
    call = engine.Generate(request(request_id="mine"))
    await anext(aiter(call))
    call.cancel()
    await eventually(lambda: scheduler.aborted == ["mine"])
    await eventually(lambda: frontend.generation.num_running == 0)


async def test_abort_ends_a_request_and_knows_no_unknown_one(scheduler: FakeScheduler, engine: Any) -> None:
    scheduler.hold_after = 1
    call = engine.Generate(request(request_id="mine"))
    stream = aiter(call)
    await anext(stream)
    for _ in range(2):
        await engine.Abort(pb.AbortRequest(request_ids=["mine", "nobody"]))
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(stream)


async def test_waiting_too_long_is_no_deadline_to_a_gateway_that_would_try_again(
    scheduler: FakeScheduler, engine: Any
) -> None:
    scheduler.rejection = RejectReason.QUEUE_TIMEOUT
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(engine.Generate(request()))
    assert (raised.value.code(), reason_of(raised.value)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")


async def test_health_follows_the_workers(
    scheduler: FakeScheduler, frontend: FrontendServer, engine: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    await eventually(lambda: frontend.generation.ready)
    assert (await engine.HealthCheck(pb.HealthCheckRequest())).healthy
    await scheduler.set_replicas(0)
    await eventually(lambda: not frontend.generation.ready)
    answer = await engine.HealthCheck(pb.HealthCheckRequest())
    assert (answer.healthy, "NO_WORKER" in answer.message.upper()) == (False, True)


async def test_the_model_is_described(scheduler: FakeScheduler, frontend: FrontendServer, engine: Any) -> None:
    info = await engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.model_type, list(info.architectures)) == (
        "byte-model",
        "llama",
        ["LlamaForCausalLM"],
    )
    assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (VOCAB_SIZE, 512, 511)
    assert list(info.eos_token_ids) == [END_TOKEN_ID]
    assert info.is_generation
    assert json.loads(info.default_sampling_params_json)["top_p"] == 1.0


async def test_the_server_and_its_load_are_described(
    scheduler: FakeScheduler, frontend: FrontendServer, engine: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    scheduler.hold_after = 1
    call = engine.Generate(request())
    await anext(aiter(call))
    info = await engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.active_requests, info.model_dtype) == ("vllm-grpc", 1, "float32")
    loads = await engine.GetLoads(pb.GetLoadsRequest(include=["core"]))
    assert [(load.num_running_reqs, load.max_total_num_tokens) for load in loads.loads] == [(1, 100_000)]
    call.cancel()


async def test_the_tokenizer_can_be_fetched(
    scheduler: FakeScheduler, frontend: FrontendServer, model_directory: Any, engine: Any
) -> None:
    chunks = [chunk async for chunk in engine.GetTokenizer(common.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.read("tokenizer.json") == (model_directory / "tokenizer.json").read_bytes()
        assert not [name for name in files.namelist() if name.endswith(".safetensors")]


@pytest.mark.parametrize("call", ["Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"])
async def test_what_needs_another_engine_is_unimplemented(frontend: FrontendServer, channel: Any, call: str) -> None:
    method = channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{call}")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in method(b""):
            pass
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "cannot be had from this server" in str(raised.value.details())


async def test_reflection_lists_the_service(frontend: FrontendServer) -> None:
    def services_listed() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "vllm.grpc.engine.VllmEngine" in await asyncio.to_thread(services_listed)


def test_without_the_package_there_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nothing: Any = None
    assert add_vllm_engine(nothing, nothing, nothing, nothing) == []


async def test_bytes_that_are_nearly_a_request_never_break_the_server(
    scheduler: FakeScheduler,
    frontend: FrontendServer,
    channel: Any,
    engine: Any,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    generate = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
    numbers = random.Random(0)
    whole = request(stop=["x"], n=2, logprobs=1, logit_bias={4: 1.0}, regex="a+").SerializeToString()
    codes: set[grpc.StatusCode] = set()
    broken: list[str] = []
    for _ in range(300):
        mutated = bytearray(whole)
        for _ in range(numbers.randint(1, 4)):
            mutated[numbers.randrange(len(mutated))] = numbers.randrange(256)
        try:
            async for _ in generate(bytes(mutated), timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
            # What is no message at all is refused by the library, in its own words.
            if error.code() is grpc.StatusCode.INTERNAL and "deserializing" not in str(error.details()):
                broken.append(str(error.details()))
    assert not broken
    assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED} <= codes
    await eventually(lambda: frontend.generation.num_running == 0)
    await read(engine.Generate(request()))
