"""Abort, Tokenize, Detokenize, ListModels."""

from typing import Any

import grpc
import pytest

from octavo.testbed.grpc_calls import collect, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb


async def test_abort_ends_the_stream_and_the_work(scheduler: FakeScheduler, stub: Any, eventually: Any) -> None:
    scheduler.hold_after = 2
    call = stub.Generate(pb.GenerateRequest(text="x", request_id="mine"))
    await anext(aiter(call))
    answer = await stub.Abort(pb.AbortRequest(request_ids=["mine", "other"]))
    assert list(answer.aborted) == ["mine"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.CANCELLED, "ABORTED")
    await eventually(lambda: scheduler.aborted == ["mine"])
    assert list((await stub.Abort(pb.AbortRequest(request_ids=["mine"]))).aborted) == []


@pytest.mark.parametrize("num_replicas", [0])
async def test_abort_of_a_request_that_still_waits_for_a_worker(scheduler: FakeScheduler, stub: Any) -> None:
    call = stub.Generate(pb.GenerateRequest(text="x", request_id="mine"))
    while not (await stub.Abort(pb.AbortRequest(request_ids=["mine"]))).aborted:
        pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert reason_of(caught.value) == "ABORTED"
    assert scheduler.submitted == []


async def test_tokenize_and_back(scheduler: FakeScheduler, stub: Any) -> None:
    tokens = await stub.Tokenize(pb.TokenizeRequest(text="日本<|im_end|>"))
    assert (len(tokens.ids), tokens.ids[-1], tokens.max_model_len) == (7, 257, 512)
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=tokens.ids))).text == "日本<|im_end|>"
    skipping = pb.DetokenizeRequest(ids=tokens.ids, skip_special_tokens=True)
    assert (await stub.Detokenize(skipping)).text == "日本"


async def test_tokenize_a_chat(scheduler: FakeScheduler, stub: Any) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    tokens = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    text = (await stub.Detokenize(pb.DetokenizeRequest(ids=tokens.ids))).text
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("Tokenize", pb.TokenizeRequest(), "BAD_PARAMETER"),
        ("Tokenize", pb.TokenizeRequest(text="x", model="other"), "MODEL_NOT_FOUND"),
        ("Tokenize", pb.TokenizeRequest(text="x" * 6000), "PROMPT_TOO_LONG"),
        ("Tokenize", pb.TokenizeRequest(chat={"messages": [{"role": "user"}] * 4097}), "BAD_PARAMETER"),
        ("Detokenize", pb.DetokenizeRequest(ids=[258]), "BAD_PARAMETER"),
        ("Detokenize", pb.DetokenizeRequest(ids=[1] * 513), "BAD_PARAMETER"),
        ("Abort", pb.AbortRequest(request_ids=["x"] * 4097), "BAD_PARAMETER"),
        ("Detokenize", pb.DetokenizeRequest(ids=[1], model="other"), "MODEL_NOT_FOUND"),
        ("ListModels", pb.ListModelsRequest.FromString(b"\xa0\x06\x01"), "UNSUPPORTED_FIELD"),
        ("Abort", pb.AbortRequest.FromString(b"\xa0\x06\x01"), "UNSUPPORTED_FIELD"),
    ],
)
async def test_bad_calls(scheduler: FakeScheduler, stub: Any, method: str, request_: Any, reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert reason_of(caught.value) == reason


async def test_models_follow_the_workers(
    fake_scheduler: FakeScheduler, stub: Any, frontend: Any, eventually: Any
) -> None:
    [model] = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model == pb.Model(id="byte-model", max_model_len=0, ready=False)
    async with fake_scheduler.serving():
        await eventually(lambda: frontend.generation.ready)
        [model] = (await stub.ListModels(pb.ListModelsRequest())).models
        assert model == pb.Model(id="byte-model", max_model_len=512, ready=True, block_size=16, kv_blocks=100)
