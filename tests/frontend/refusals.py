"""What each interface tells clients of every sampling field at its limits and beyond them, word for word.

`python -m tests.frontend.refusals` writes `refusals.txt`, for a change that clients are to see.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import msgspec
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_services

from octavo.frontend.config import FrontendConfig
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import ModelInfo

TOLD: Final = Path(__file__).with_name("refusals.txt")
_TINY: Final = 5e-324
_INTS: Final = (-1, 0, 2**31 - 1, 2**31, 2**64 - 1, 2**64)
_FEW: Final = (-1, 0, 1, 16, 17)
_TOP: Final = (-1, 0, 20, 21)
_PENALTY: Final = (-2.5, -2.0, 2.0, 2.5, math.nan)
_BIG_IDS: Final[tuple[list[int], ...]] = ([], [1] * 1024, [1] * 1025, [VOCAB_SIZE])
# Place in octavo.v1.GenerateRequest, name in OpenAI's bodies, name in vLLM's protocol (empty: none), and values.
FIELDS: Final[tuple[tuple[str, str, str, tuple[Any, ...]], ...]] = (
    ("sampling.temperature", "temperature", "temperature", (-0.1, 0.0, 100.0, 100.5, math.nan, math.inf)),
    ("sampling.top_p", "top_p", "top_p", (-0.0, 0.0, _TINY, 1.0, 1.5, math.nan)),
    ("sampling.top_k", "top_k", "top_k", (-2, *_INTS)),
    ("sampling.min_p", "min_p", "min_p", (-0.5, 0.0, 1.0, 1.5)),
    ("sampling.frequency_penalty", "frequency_penalty", "frequency_penalty", _PENALTY),
    ("sampling.presence_penalty", "presence_penalty", "presence_penalty", _PENALTY),
    ("sampling.repetition_penalty", "repetition_penalty", "repetition_penalty", (0.0, 0.005, 0.01, 2.0, 2.5)),
    ("sampling.seed", "seed", "seed", (*_INTS, -(2**63), -(2**63) - 1)),
    ("sampling.num_sequences", "n", "n", _FEW),
    ("sampling.best_of", "best_of", "", _FEW),
    ("sampling.logit_bias", "logit_bias", "logit_bias", ({1: -100.0}, {1: 100.5}, {VOCAB_SIZE: 1.0})),
    ("sampling.logit_bias", "logit_bias", "logit_bias", (dict.fromkeys(range(301), 1.0), {})),
    ("sampling.allowed_token_ids", "allowed_token_ids", "", _BIG_IDS),
    ("sampling.banned_token_ids", "banned_token_ids", "", _BIG_IDS),
    ("sampling.beam_search.beam_width", "", "", (0, 1, 16, 17)),
    ("sampling.beam_search.length_penalty", "length_penalty", "", (-100.5, -100.0, 100.0, 100.5)),
    ("stopping.max_new_tokens", "max_tokens", "max_tokens", (-1, 0, 1, 511, 512, 2**32, 2**64)),
    ("stopping.max_new_tokens", "max_completion_tokens", "", (0, 1, 512)),
    ("stopping.max_new_tokens", "max_output_tokens", "", (0, 1, 512)),
    ("stopping.min_new_tokens", "min_tokens", "min_tokens", (-1, 0, 1, 2)),
    ("stopping.stop_strings", "stop", "stop", ([], ["x"] * 8, ["x"] * 9, ["é" * 129], [""])),
    ("stopping.stop_token_ids", "stop_token_ids", "stop_token_ids", ([], [1], [1] * 129, [*range(128)], [VOCAB_SIZE])),
    ("stopping.include_stop", "include_stop_str_in_output", "include_stop_str_in_output", (True,)),
    ("stopping.ignore_eos", "ignore_eos", "ignore_eos", (True,)),
    ("response.top_logprobs", "logprobs", "logprobs", _TOP),
    ("", "top_logprobs", "", _TOP),
    ("response.prompt_logprobs", "prompt_logprobs", "prompt_logprobs", _TOP),
    ("response.skip_special_tokens", "skip_special_tokens", "skip_special_tokens", (False,)),
    ("response.incremental", "stream", "", (True,)),
    ("scheduling.priority", "priority", "", (-101, -100, 100, 101)),
    ("scheduling.tenant", "", "", ("x" * 256, "x" * 257, "\n")),
    ("scheduling.max_queue_time.seconds", "max_queue_time", "", (-1, 0, 1, 86400, 86401, 2_000_000)),
    ("scheduling.detach_grace.seconds", "", "", (-1, 0, 1, 86401)),
    ("cache.salt", "cache_salt", "", ("x" * 256, "x" * 257, "\n")),
    ("cache.pinned_prefix", "pinned_prefix", "", ("none",)),
    ("model", "model", "", ("byte-model", "other")),
    ("request_id", "request_id", "", ("x" * 128, "x" * 129, "\n")),
    ("constraint.regex", "guided_regex", "regex", ("a+", "x" * 65_537)),
    ("constraint.choice.choices", "guided_choice", "choice.choices", (["a"], ["a"] * 1025, [])),
)
# What is fine by itself and cannot be had together.
_BEAM: Final = {"beam_search": {"beam_width": 4}}
_BEAMS: Final = {"use_beam_search": True, "n": 4}
TOGETHER: Final[tuple[tuple[dict[str, Any], dict[str, Any]], ...]] = (
    ({"sampling": {"num_sequences": 3, "best_of": 2}}, {"n": 3, "best_of": 2}),
    ({"sampling": {"best_of": 2, **_BEAM}}, {**_BEAMS, "best_of": 2}),
    *(
        ({"sampling": {name: 0.5, **_BEAM}}, {name: 0.5, **_BEAMS})
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    ),
    ({"sampling": {"top_k": 5, **_BEAM}}, {"top_k": 5, **_BEAMS}),
    ({"sampling": {"top_k": 5, "top_p": 0.5, "min_p": 2.0}}, {"top_k": 5, "top_p": 0.5, "min_p": 2.0}),
    ({"sampling": _BEAM, "stopping": {"stop_strings": ["x"]}}, {**_BEAMS, "stop": "x"}),
    ({"sampling": _BEAM, "response": {"top_logprobs": 1}}, {**_BEAMS, "logprobs": 1}),
    ({"stopping": {"min_new_tokens": 3, "max_new_tokens": 2}}, {"min_tokens": 3, "max_tokens": 2}),
    ({"sampling": {"allowed_token_ids": [1], "banned_token_ids": [1]}}, {"allowed_token_ids": [1]}),
    ({"constraint": {"regex": "a"}, "stopping": {"ignore_eos": True}}, {"guided_regex": "a", "ignore_eos": True}),
    ({"sampling": _BEAM}, _BEAMS),
    ({}, {}),
)
ROUTES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1, "seed": 7},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "seed": 7},
    "/v1/responses": {"input": "x", "max_output_tokens": 1, "seed": 7},
}


@dataclass(frozen=True)
class Interfaces:
    """Holds a client of each interface of one frontend, and the scheduler behind it."""

    scheduler: FakeScheduler
    stub: Any
    engine: Any
    http: httpx.AsyncClient

    async def told(self) -> list[str]:
        """Sends every value through every interface that has a name for it; returns a line for each."""
        lines = []
        for path, name, other, values in FIELDS:
            for value in values:
                lines += [line async for line in self._one(path, name, other, value)]
        for fields, body in TOGETHER:
            message = pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1}, sampling={"seed": 7})
            message.MergeFrom(pb.GenerateRequest(**fields))
            lines.append(await self._grpc(f"gRPC {_short(fields)}", self.stub.Generate(message)))
            lines += await self._routes(body)
        return lines

    async def _one(self, path: str, name: str, other: str, value: Any) -> Any:
        if path and (message := _message(path, value)):
            yield await self._grpc(f"gRPC {path} {_short(value)}", self.stub.Generate(message))
        if other and (message := _vllm_message(other, value)):
            yield await self._grpc(f"vLLM {other} {_short(value)}", self.engine.Generate(message))
        if name:
            fields = {name: value} | ({"use_beam_search": True} if "length" in name else {})
            for line in await self._routes(fields):
                yield line

    async def _routes(self, fields: dict[str, Any]) -> list[str]:
        """Returns what every route tells, in one line if that is the same everywhere."""
        told = {route: await self._http(route, fields) for route in ROUTES}
        if len(set(told.values())) == 1:
            told = {"HTTP": told["/v1/completions"]}
        return [f"{route} {_short(fields)}: {line}" for route, line in told.items()]

    async def _grpc(self, what: str, call: Any) -> str:
        self.scheduler.submitted.clear()
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{what}: {error.code().name} {reason_of(error)}: {error.details()}"
        return f"{what}: {self._in_force()}"

    async def _http(self, route: str, fields: dict[str, Any]) -> str:
        self.scheduler.submitted.clear()
        body = json.dumps(ROUTES[route] | fields)
        answer = await self.http.post(route, content=body, headers={"content-type": "application/json"})
        if answer.status_code != 200:
            error = answer.json()["error"]
            return f"{answer.status_code} {error['type']} {error['code']} {error['param']}: {error['message']}"
        ignored = answer.headers.get("x-octavo-unknown-fields")
        return self._in_force() + (f", not honoured: {ignored}" if ignored else "")

    def _in_force(self) -> str:
        """Returns what the scheduler was asked for and is not the plainest request."""
        [request] = self.scheduler.submitted
        plain = msgspec.structs.asdict(SamplingParams(max_tokens=1, stop_token_ids=[257], seed=7))
        asked = msgspec.structs.asdict(request.sampling)
        # Its text is the grammars' library's.
        asked["grammar"] = bool(asked["grammar"])
        plain["grammar"] = False
        shown = {name: value for name, value in asked.items() if value != plain[name]}
        others = {"priority": request.priority, "tenant": request.tenant, "max_queue_ms": request.max_queue_ms}
        shown |= {name: value for name, value in others.items() if value}
        return _short(shown)


def _message(path: str, value: Any) -> pb.GenerateRequest | None:
    """Returns a request with the value at its path; None if no client can send it."""
    *parents, name = path.split(".")
    fields = {name: value}
    for parent in reversed(parents):
        fields = {parent: fields}
    try:
        message = pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1}, sampling={"seed": 7})
        message.MergeFrom(pb.GenerateRequest(**fields))
        if name == "length_penalty":
            message.sampling.beam_search.beam_width = 2
    except (ValueError, TypeError):
        return None
    return message


def _vllm_message(name: str, value: Any) -> Any:
    fields = {"choice": {"choices": value}} if name == "choice.choices" else {name: value}
    try:
        params = vllm.SamplingParams(max_tokens=1, seed=7, skip_special_tokens=True)
        params.MergeFrom(vllm.SamplingParams(**fields))
        if name == "skip_special_tokens":
            params.skip_special_tokens = value
        return vllm.GenerateRequest(tokenized={"input_ids": [1]}, sampling_params=params)
    except (ValueError, TypeError):
        return None


def _short(value: Any) -> str:
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 120 else f"{text[:40]}...({len(text)})"


async def told() -> list[str]:
    """Returns the lines of a frontend of its own."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_byte_model(folder / "byte-model", max_model_len=512)
        config = FrontendConfig(
            model_directory=folder / "byte-model",
            served_model_name="byte-model",
            listen="127.0.0.1:0",
            http_listen="127.0.0.1:0",
            scheduler_endpoints=(f"ipc://{folder}/frontends.sock",),
            worker_grace_s=60.0,
            text_processes=1,
        )
        model = ModelInfo("byte-model", fingerprint(config.model_directory), "float32", VOCAB_SIZE, 512)
        scheduler = FakeScheduler(config.scheduler_endpoints[0], model)
        await stack.enter_async_context(scheduler.serving())
        server, _ = await stack.enter_async_context(running_frontend(config))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", trust_env=False, timeout=60)
        await stack.enter_async_context(http)
        stubs = services.GenerationServiceStub(channel), vllm_services.VllmEngineStub(channel)
        return await Interfaces(scheduler, *stubs, http).told()


def differences(now: Iterable[str]) -> Iterator[str]:
    """Yields the lines of `refusals.txt` that are told no more, and those that are new."""
    before, after = TOLD.read_text(encoding="utf-8").splitlines(), list(now)
    yield from (f"- {line}" for line in before if line not in after)
    yield from (f"+ {line}" for line in after if line not in before)


if __name__ == "__main__":
    TOLD.write_text("".join(f"{line}\n" for line in asyncio.run(told())), encoding="utf-8")
