"""Mixes good and bad clients: every kind of request through gRPC and HTTP, some given up before the end."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import grpc
import httpx

from octavo.chaos.fuzz.target import FAULT
from octavo.testbed.stack import Stack, token_request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_AT_ONCE: Final = 24
_LATE: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_BAD: Final[list[dict[str, Any]]] = [
    {"n": 99},
    {"temperature": -1},
    {"model": "other"},
    {"guided_regex": "("},
    {"suffix": "x"},
    {"prompt": "x" * 10_000},
    {"max_tokens": 2**40},
]


def soak(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Sends so many requests; an attack by clients most of whom mean well."""
    return asyncio.run(_Crowd(stack, rng).send(messages))


class _Crowd:
    def __init__(self, stack: Stack, rng: Random) -> None:
        self._stack, self._rng = stack, rng
        self._answers: Counter[str] = Counter()

    async def send(self, messages: int) -> Counter[str]:
        transport = httpx.AsyncHTTPTransport(uds=str(self._stack.http_socket))
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with (
            grpc.aio.insecure_channel(self._stack.address, options) as channel,
            httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60, trust_env=False) as http,
        ):
            stub: Any = services.GenerationServiceStub(channel)
            ways: list[Callable[[], Awaitable[str]]] = [
                lambda: self._over_grpc(stub),
                lambda: self._cancelled(stub),
                lambda: self._attached(stub),
                lambda: self._over_http(http),
                lambda: self._streamed(http),
                lambda: self._left(http),
                lambda: self._bad(http),
            ]
            numbers = iter(range(messages))
            await asyncio.gather(*(self._send_some(ways, numbers) for _ in range(_AT_ONCE)))
        return self._answers

    async def _send_some(self, ways: list[Callable[[], Awaitable[str]]], numbers: Any) -> None:
        for _ in numbers:
            self._answers[await self._rng.choice(ways)()] += 1

    def _message(self) -> pb.GenerateRequest:
        rng = self._rng
        request = token_request(rng.choices(range(200), k=rng.randint(1, 60)), rng.randint(1, 40))
        match rng.randrange(5):
            case 0:
                request.sampling.num_sequences = rng.randint(2, 4)
                request.sampling.temperature = 1.0
            case 1:
                request.sampling.beam_search.beam_width = rng.randint(2, 4)
            case 2:
                request.stopping.ignore_eos = False
                request.constraint.regex = "[ab]{1,9}"
            case 3:
                request.response.top_logprobs = request.response.prompt_logprobs = 2
        return request

    def _body(self) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"prompt": "x" * rng.randint(1, 60), "max_tokens": rng.randint(1, 40)}
        return body | rng.choice(
            [{}, {"n": 3, "temperature": 1}, {"use_beam_search": True, "best_of": 3}, {"guided_choice": ["aa", "b"]}]
        )

    async def _over_grpc(self, stub: Any) -> str:
        events = [event async for event in stub.Generate(self._message(), timeout=60)]
        return "answers" if events[-1].HasField("usage") else f"{FAULT}: an answer without an end"

    async def _cancelled(self, stub: Any) -> str:
        call = stub.Generate(self._message(), timeout=self._rng.choice([0.02, 60]))
        try:
            async for _ in call:
                if self._rng.random() < 0.2:
                    call.cancel()
        except asyncio.CancelledError:
            return "cancelled"
        except grpc.aio.AioRpcError as error:
            return "late" if error.code() in _LATE else f"{FAULT}: {error.code()} {error.details()}"
        return "answers"

    async def _attached(self, stub: Any) -> str:
        request = self._message()
        request.request_id = f"a{self._rng.getrandbits(60)}"
        request.scheduling.detach_grace.FromSeconds(1)
        call, last = stub.Generate(request, timeout=60), 0
        async for event in call:
            last = event.event_offset
            break
        call.cancel()
        again = stub.Attach(pb.AttachRequest(request_id=request.request_id, after_event_offset=last), timeout=60)
        offsets = [response.event.event_offset async for response in again]
        is_whole = offsets == list(range(last + 1, last + 1 + len(offsets)))
        return "answers after coming back" if is_whole else f"{FAULT}: after {last} came {offsets}"

    async def _over_http(self, http: httpx.AsyncClient) -> str:
        response = await http.post("/v1/completions", json=self._body())
        return "answers" if response.status_code == 200 else f"{FAULT}: {response.status_code} {response.text[:300]}"

    async def _streamed(self, http: httpx.AsyncClient) -> str:
        async with http.stream("POST", "/v1/completions", json={**self._body(), "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
        return "answers" if lines[-1] == "data: [DONE]" else f"{FAULT}: a stream that ends with {lines[-1][:300]}"

    async def _left(self, http: httpx.AsyncClient) -> str:
        async with http.stream("POST", "/v1/completions", json={**self._body(), "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        return "left"

    async def _bad(self, http: httpx.AsyncClient) -> str:
        response = await http.post("/v1/completions", json={**self._body(), **self._rng.choice(_BAD)})
        is_refused = response.status_code in (400, 404)
        return "refusals" if is_refused else f"{FAULT}: {response.status_code} {response.text[:300]}"
