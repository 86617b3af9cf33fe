"""Sends hostile inputs: each is what one client does to all others, from one process, for a while."""

import asyncio
import contextlib
import json
import resource
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from octavo.chaos.fuzz.connections import HTTP2_PREFACE
from octavo.chaos.fuzz.neighbour import AttackedServer, connection, request_bytes
from octavo.frontend.request.request import bounds_of
from octavo.wire.sampling import PENALTIES

# How large an input is, beside what the table of inputs says: 1 is as large as it was when it did harm.
Hostile = Callable[[AttackedServer, float, float], Coroutine[Any, Any, Counter[str]]]

AMBIGUOUS: Final = 'start: s\ns: s s | s s s | "a"\n'
_DEEP_LEVELS: Final = 30
_WIDE_PROPERTIES: Final = 60


async def nothing(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Does nothing: the neighbour's figures where nobody disturbs it."""
    await asyncio.sleep(seconds)
    return Counter()


async def idle_http(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Connections on which nothing is said."""
    return await _idle(target.http, round(4100 * scale), b"", seconds)


async def idle_grpc(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Opens many connections to the gRPC port that say nothing."""
    return await _idle(target.grpc, round(4150 * scale), b"", seconds)


async def half_open_http2(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Begins HTTP/2 connections and does not go on with them."""
    return await _idle(target.grpc, round(2000 * scale), HTTP2_PREFACE, seconds)


async def half_open_tls(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Handshakes that are begun and not gone on with, on both ports."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    counts = await asyncio.gather(
        _idle(target.http, round(2100 * scale), hello, seconds), _idle(target.grpc, round(2100 * scale), hello, seconds)
    )
    return counts[0] + counts[1]


async def unread_streams(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Streams of large events that nobody reads, until they are cut off."""
    body = {**_long_answer(round(8000 * scale), top=20), "stream": True}
    return await _unread(target, [body] * 16, seconds)


async def large_answers(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Answers that are no streams, with many logprobs, of clients who read them."""
    body = _long_answer(round(4000 * scale), top=5)
    return await _ask(target, [("/v1/completions", body)] * 4)


async def large_chats(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Asks for large answers with logprobs through the chat completions."""
    body = _long_answer(round(4000 * scale), top=5)
    chat = {**body, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    del chat["prompt"]
    return await _ask(target, [("/v1/chat/completions", chat)] * 4)


async def unread_answers(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Asks for large answers that are no streams, and reads none of them."""
    return await _unread(target, [_long_answer(round(4000 * scale), top=5)] * 8, seconds)


async def scored_prompts(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Prompts as long as may be, every token of which is to be reported with twenty others."""
    body = {"prompt": [5] * round(8000 * scale), "max_tokens": 1, "prompt_logprobs": 20, "ignore_eos": True}
    return await _ask(target, [("/v1/completions", body)] * 4)


async def ambiguous_grammars(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Texts that can be read in ever more ways."""
    body = {"prompt": "x", "max_tokens": 90, "guided_grammar": AMBIGUOUS, "temperature": 1, "logit_bias": {"97": 5}}
    return await _ask(target, [("/v1/completions", body)] * round(40 * scale))


async def deep_schemas(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Sends schemas of many levels and of many optional properties, each another."""

    def schema(number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string", "pattern": f"^(a|b|ab){{1,{number + 2}}}$"}
        for level in range(_DEEP_LEVELS):
            names = [f"p{number}_{level}_{i}" for i in range(_WIDE_PROPERTIES if level == 0 else 2)]
            found = {"type": "object", "properties": {name: found if i == 0 else {} for i, name in enumerate(names)}}
        return found

    bodies = [{"prompt": "x", "max_tokens": 100, "guided_json": schema(i)} for i in range(round(40 * scale))]
    return await _ask(target, [("/v1/completions", body) for body in bodies])


async def huge_biases(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Asks for as many biases, bans and penalties as may be."""
    body = {
        "prompt": "x",
        "max_tokens": 200,
        "n": 16,
        "temperature": 1,
        "logit_bias": {str(i): (-1) ** i * 5 for i in range(200)},
        **{name: bounds_of(name).high for name in PENALTIES},
        "ignore_eos": True,
    }
    return await _ask(target, [("/v1/completions", body)] * round(16 * scale))


async def unfinished_bodies(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Sends bodies of four megabytes that lack their last byte."""
    length = 4 << 20
    head = request_bytes("/v1/completions", {}).replace(b"content-length: 2", b"content-length: %d" % length)[:-2]
    return await _idle(target.http, round(400 * scale), head + b" " * (length - 1), seconds)


async def burst(target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Makes more calls at once than are held."""
    body = {"prompt": "hello", "max_tokens": 16, "ignore_eos": True}
    return await _ask(target, [("/v1/completions", body)] * round(2080 * scale))


INPUTS: Final[dict[str, Hostile]] = {
    each.__name__: each
    for each in (
        nothing,
        idle_http,
        idle_grpc,
        half_open_http2,
        half_open_tls,
        unread_streams,
        large_answers,
        large_chats,
        unread_answers,
        scored_prompts,
        ambiguous_grammars,
        deep_schemas,
        huge_biases,
        unfinished_bodies,
        burst,
    )
}


# Those that need a server with TLS.
OVER_TLS: Final = frozenset({"half_open_tls"})


def attack(name: str, target: AttackedServer, scale: float, seconds: float) -> Counter[str]:
    """Does it, in this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(INPUTS[name](target, scale, seconds))


def _long_answer(tokens: int, top: int) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": tokens, "n": 16, "logprobs": top, "ignore_eos": True, "temperature": 1}


async def _idle(address: tuple[str, int], count: int, data: bytes, seconds: float) -> Counter[str]:
    """Opens `count` connections that send `data` and nothing more, for `seconds`."""
    counts: Counter[str] = Counter()
    writers = []
    at_once = asyncio.Semaphore(64)

    async def connect() -> None:
        async with at_once:
            try:
                async with asyncio.timeout(10):
                    _, writer = await asyncio.open_connection(*address)
                    writers.append(writer)
                    writer.write(data)
                    await writer.drain()
                counts["connected"] += 1
            except (OSError, TimeoutError) as error:
                counts[type(error).__name__] += 1

    await asyncio.gather(*(connect() for _ in range(count)))
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()
    return counts


async def _unread(target: AttackedServer, bodies: list[dict[str, Any]], seconds: float) -> Counter[str]:
    """Asks, and never reads, until the server ends each connection or the time is over."""
    sockets = []
    for body in bodies:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(target.http)
        client.sendall(request_bytes("/v1/completions", body))
        sockets.append(client)
    await asyncio.sleep(seconds)
    for client in sockets:
        client.close()
    return Counter({"unread": len(sockets)})


async def _ask(target: AttackedServer, calls: list[tuple[str, dict[str, Any]]]) -> Counter[str]:
    """Sends all requests at once, and counts the answers by status."""
    counts: Counter[str] = Counter()

    async def ask(path: str, body: dict[str, Any]) -> None:
        try:
            async with connection(target) as (reader, writer):
                writer.write(request_bytes(path, body))
                first = await reader.readline()
                last = b""
                while part := await reader.read(1 << 20):
                    last = part
            counts[first[9:12].decode() or "nothing"] += 1
            if first[9:12] not in (b"200", b""):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    text = last[last.index(b"{") :]
                    counts[str(json.loads(text)["error"]["message"])[:60]] += 1
        except OSError as error:
            counts[type(error).__name__] += 1

    await asyncio.gather(*(ask(*call) for call in calls))
    return counts
