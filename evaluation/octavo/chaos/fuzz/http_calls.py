"""Attacks the HTTP port: any bytes, requests with anything in their bodies, and some that are put together badly."""

import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, Final

from octavo.chaos.fuzz.connections import Address, Listening, say
from octavo.chaos.fuzz.noise import changed, garbage, mutated
from octavo.chaos.fuzz.target import FAULT
from octavo.frontend.errors import internal_error
from octavo.testbed.stack import Stack

# Bytes, and whether they are a request that is to be answered, and the last of its connection.
Sent = tuple[bytes, bool]

_AT_ONCE: Final = 8
_METRICS: Final = re.compile(r"metrics at http://127\.0\.0\.1:(\d+)/metrics")
# Errors of the server's own are told in these words in the form of every API.
_FAULT_MESSAGE: Final = str(internal_error()).encode()
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_SAMPLING: Final[dict[str, Any]] = {
    "model": "byte-model",
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "n": 2,
    "seed": 1,
    "stop": ["x", "yz"],
    "stream": False,
    "logit_bias": {"5": 1.5},
    "min_tokens": 1,
    "priority": 1,
    "cache_salt": "s",
    "timeout": 1.0,
}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_CHAT: Final = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-z]+"}}, "required": ["a"]}
_CUSTOM: Final = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
_TURNS: Final = [
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5", "is_error": True}]},
]
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
# What is good at every route that takes a body, to be corrupted.
_BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/completions": [
        {**_SAMPLING, "prompt": "hello", "logprobs": 2, "echo": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "x", "max_tokens": 4, "use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0},
        {"prompt": "x", "max_tokens": 4, "guided_choice": ["yes", "no"]},
        {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{1,3}"}},
    ],
    "/v1/chat/completions": [
        {**_SAMPLING, "messages": _CHAT, "tools": [_TOOL], "tool_choice": "auto", "stream": True},
        {"messages": _CHAT[:2], "max_tokens": 3, "response_format": _FORMAT, "logprobs": True, "top_logprobs": 2},
        {"messages": _CHAT[:2], "max_tokens": 3, "tools": [_TOOL], "tool_choice": "required"},
    ],
    "/v1/responses": [
        {"input": "hello", "max_output_tokens": 3, "instructions": "be brief", "stream": True},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "max_output_tokens": 2},
        {"input": "x", "max_output_tokens": 3, "text": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ],
    "/v1/messages": [
        {"messages": _TURNS, "system": "be brief", "max_tokens": 3, "tools": [_CUSTOM], "stream": True},
        {"messages": _TURNS[:1], "max_tokens": 3, "tools": [_CUSTOM], "tool_choice": {"type": "any"}},
        {
            "messages": _TURNS[:1],
            "max_tokens": 4,
            "stop_sequences": ["x"],
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": _TURNS, "system": [{"type": "text", "text": "x"}], "tools": [_CUSTOM]}],
    "/tokenize": [{"prompt": "hello", "add_special_tokens": True}, {"messages": _CHAT[:2]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
_PATHS: Final = (
    *_BODIES,
    "/v1/models",
    "/v1/models/byte-model",
    "/livez",
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/load",
    "/requests/nobody",
    "/",
    "/v1/nothing",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/completions?x=%00",
    "/%ff",
    "//",
    "*",
    "http://other/v1/models",
    "/" + "x" * 5000,
    "/static/../../secret",
)
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PRI", "get", "X" * 300, "\0")
_HEADERS: Final = (
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: x",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Expect: 100-continue",
    b"Expect: 7",
    b"Content-Encoding: gzip",
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16",
    b"Host: a\r\nHost: b",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Connection: close, keep-alive",
    b"X-Request-Id: \xff\xfe",
    b"X-Tenant-Id: " + b"t" * 400,
    b"Authorization: Bearer \xc3\xa9",
    b"Traceparent: 00-zz",
    b"Anthropic-Version: 2023-01-01",
    b"Anthropic-Beta: \xff,,x",
    b"Range: bytes=0-1,5-,-9",
    b'If-None-Match: ""',
    b"X: " + b"y" * 40_000,
    b": no name",
    b" folded: x",
    b"Bad Name: x",
    b"X: a\rb",
    b"\0: \0",
)
_CHUNKS: Final = (
    b'5\r\n{"pro\r\n',
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\nx",
    b"-1\r\nx\r\n",
    b'5;ext="\r\nabcde\r\n',
    b"0x5\r\nabcde\r\n",
    b"5\nabcde\n",
    b"0\r\nTrailer: x\r\n\r\n",
    b"1\r\n\r\n",
    b"zz\r\n",
)


def http(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Sends so many requests to the frontend; an attack."""
    return spray(stack.http_socket, rng, messages, request)


def spray(address: Address, rng: Random, messages: int, draw: Callable[[Random], Sent]) -> Counter[str]:
    """Sends what `draw` makes, each over a connection of its own; counts the statuses of what is answered."""
    answers: Counter[str] = Counter()
    drawn = iter([draw(rng) for _ in range(_AT_ONCE * 8)] for _ in range(0, messages, _AT_ONCE * 8))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # In parts, so that not all of them are made at once.
        for part in drawn:
            for sent, answer in zip(part, pool.map(lambda sent: _answer(address, sent), part), strict=True):
                answers.update(_described(sent[0], answer))
    return answers


def _answer(address: Address, sent: Sent) -> bytes:
    data, is_whole = sent
    return say(address, data, Listening.TO_ITS_END if is_whole else Listening.AS_IF_LEAVING)


def _described(data: bytes, answer: bytes) -> list[str]:
    statuses = [status.decode() for status in _STATUS.findall(answer)] or ["nothing"]
    if (place := answer.find(_FAULT_MESSAGE)) >= 0 or "500" in statuses:
        return [f"{FAULT}: {answer[: place + 60][-400:]!r} to {data!r}"]
    return statuses


def request(rng: Random) -> Sent:
    """Makes a request with something wrong, mostly."""
    match rng.randrange(10):
        case 0:
            return garbage(rng), False
        case 1:
            return mutated(rng, _posted(rng)), False
        case 2:
            path, body = _corrupted(rng)
            return _head("POST", path, rng.choice(_HEADERS), b"Content-Length: %d" % len(body)) + body, False
        case 3:
            return _head(rng.choice(_METHODS), rng.choice(_PATHS), rng.choice(_HEADERS)) + garbage(rng, 64), False
        case 4:
            chunks = b"".join(rng.choices(_CHUNKS, k=rng.randrange(5)))
            return _head("POST", rng.choice(list(_BODIES)), b"Transfer-Encoding: chunked") + chunks, False
        case 5:
            whole = _posted(rng)
            return whole[: rng.randrange(len(whole))], False
        case 6:
            more = (_posted(rng, last=False) for _ in range(rng.randint(1, 3)))
            return b"".join(more) + _posted(rng), True
        case 7:
            return _head("GET", rng.choice(_PATHS), b"Connection: close"), True
    return _posted(rng), True


def _posted(rng: Random, *, last: bool = True) -> bytes:
    path, body = _corrupted(rng)
    return _head("POST", path, b"Content-Length: %d" % len(body), *[b"Connection: close"] * last) + body


def _corrupted(rng: Random) -> tuple[str, bytes]:
    path = rng.choice(list(_BODIES))
    body: Any = rng.choice(_BODIES[path])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
        body = changed(rng, body)
    text = json.dumps(body).encode()
    return path, mutated(rng, text) if rng.random() < 0.2 else text


def _head(method: str, path: str, *headers: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def metrics_of(process: str) -> Callable[[Stack, Random, int], Counter[str]]:
    """Makes an attack on the port on which a process serves its metrics alone."""

    def send(stack: Stack, rng: Random, messages: int) -> Counter[str]:
        port = int(_METRICS.findall(stack.log(process))[-1])
        return spray(("127.0.0.1", port), rng, messages, request)

    return send
