"""Reads streams of server-sent events, each on a connection of its own: `python -m octavo.bench.frontend.sse_load
SETUP`; see `load`."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

from octavo.bench.frontend.load import TOKEN_CHARACTERS, Receipts, StreamLoad, connect, read_all, run

_DONE = b"data: [DONE]\n\n"
# The path of each API, and the end of its streams.
_APIS = {
    "completions": ("/v1/completions", _DONE),
    "chat": ("/v1/chat/completions", _DONE),
    "messages": ("/v1/messages", b'data: {"type":"message_stop"}\n\n'),
    # The last event holds the whole answer; this is the end of the body.
    "responses": ("/v1/responses", b"0\r\n\r\n"),
}


def load(asked: StreamLoad) -> list[Receipts]:
    pieces: list[list[tuple[float, bytes]]] = [[] for _ in range(asked.streams)]
    end = _APIS[asked.api][1]

    def take(place: int, at: float, data: bytes) -> bool:
        pieces[place].append((at, data))
        return end in data

    with ExitStack() as held:
        connections = [held.enter_context(connect(asked.host, asked.port)) for _ in pieces]
        for connection in connections:
            connection.sendall(call_bytes(asked))
        read_all(connections, take)
    return [_receipts(one) for one in pieces]


def call_bytes(asked: StreamLoad) -> bytes:
    """Makes a streaming call of the API, as bytes."""
    prompt: dict[str, object] = {"prompt": asked.prompt}
    limit = "max_tokens"
    if asked.api == "responses":
        prompt, limit = {"input": asked.prompt}, "max_output_tokens"
    elif asked.api != "completions":
        prompt = {"messages": [{"role": "user", "content": asked.prompt}]}
    if asked.among:
        prompt["allowed_token_ids"] = list(asked.among)
    body = json.dumps({**prompt, limit: asked.tokens, "ignore_eos": True, "stream": True}).encode()
    # The frontend refuses calls to a host that it does not know.
    head = f"POST {_APIS[asked.api][0]} HTTP/1.1\r\nhost: {asked.host}:{asked.port}\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _receipts(pieces: list[tuple[float, bytes]]) -> Receipts:
    found = [(at, len(text) // TOKEN_CHARACTERS) for at, event in _events(pieces) if (text := _text(event))]
    return [(at, count) for at, count in found if count]


def _text(event: bytes) -> str:
    # Events of messages have a name before.
    _, found, payload = event.rpartition(b"data: {")
    if not found:
        return ""
    chunk = json.loads(b"{" + payload)
    if chunk.get("error"):
        raise ConnectionError(f"a stream has failed: {chunk}")
    if "choices" not in chunk:
        delta = chunk.get("delta", "")
        return str(delta.get("text", "")) if isinstance(delta, dict) else delta
    choice = chunk["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yields each event with the time of its last byte. Raises `ConnectionError` if the server refused the stream."""
    raw, body, has_begun = b"", b"", False
    for at, piece in pieces:
        raw += piece
        if not has_begun and b"\r\n\r\n" in raw:
            head, _, raw = raw.partition(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise ConnectionError(f"a stream was refused: {head!r} {raw!r}")
            has_begun = True
        while has_begun and (chunk := _chunk(raw)):
            body, raw = body + chunk[0], chunk[1]
        *events, body = body.split(b"\n\n")
        yield from ((at, event) for event in events)


def _chunk(raw: bytes) -> tuple[bytes, bytes] | None:
    """Returns the first chunk of a body in chunked coding (RFC 9112), and what follows; None unless the chunk is there
    as a whole."""
    size, found, rest = raw.partition(b"\r\n")
    if not found or len(rest) < (length := int(size, 16)) + 2:
        return None
    return rest[:length], rest[length + 2 :]


if __name__ == "__main__":
    run(load)
