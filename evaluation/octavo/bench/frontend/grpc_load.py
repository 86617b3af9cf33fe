"""Reads streams over gRPC, frame by frame: `python -m octavo.bench.frontend.grpc_load SETUP`; see `load`.

Just enough of HTTP/2 (RFC 9113) to send requests and find the messages in what comes.
"""

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from octavo.bench.frontend.load import Receipts, StreamLoad, connect, read_all, run
from octavo.v1 import generation_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_LARGEST_WINDOW = (1 << 31) - 1
_INITIAL_WINDOW = 65535
_INITIAL_WINDOW_SIZE = 4
_PATH = b"/octavo.v1.GenerationService/Generate"


def load(asked: StreamLoad) -> list[Receipts]:
    """Streams of all connections; stream `i` is on connection `i % connections`."""
    with ExitStack() as held:
        connections = [held.enter_context(connect(asked.host, asked.port)) for _ in range(asked.connections)]
        return _read(asked, connections)


def _read(asked: StreamLoad, connections: Sequence[socket.socket]) -> list[Receipts]:
    readers = [_Reader() for _ in connections]
    for place, connection in enumerate(connections):
        streams = range(place, asked.streams, asked.connections)
        readers[place].open = len(streams)
        calls = b"".join(_call(2 * number + 1, asked) for number, _ in enumerate(streams))
        connection.sendall(_PREFACE + _opening() + calls)

    def take(place: int, at: float, data: bytes) -> bool:
        if answer := readers[place].feed(at, data):
            connections[place].sendall(answer)
        return not readers[place].open

    read_all(connections, take)
    return [_receipts(messages) for reader in readers for messages in reader.messages.values()]


def _receipts(messages: list[tuple[float, bytes]]) -> Receipts:
    events = ((at, pb.GenerateResponse.FromString(message)) for at, message in messages)
    return [(at, len(event.delta.token_ids)) for at, event in events if event.HasField("delta")]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _opening() -> bytes:
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
    more = struct.pack(">I", _LARGEST_WINDOW - _INITIAL_WINDOW)
    return _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more)


def _call(stream: int, asked: StreamLoad) -> bytes:
    message = pb.GenerateRequest(
        text=asked.prompt,
        sampling=pb.SamplingParams(allowed_token_ids=asked.among),
        stopping=pb.StoppingCriteria(max_new_tokens=asked.tokens, ignore_eos=True),
    ).SerializeToString()
    data = b"\0" + struct.pack(">I", len(message)) + message
    # What is larger than a frame may be is cut; prompts here are shorter than the window is at first.
    pieces = [data[start : start + 16384] for start in range(0, len(data), 16384)]
    frames = [_frame(_HEADERS, _END_HEADERS, stream, _headers())]
    frames += [_frame(_DATA, _END_STREAM * (piece is pieces[-1]), stream, piece) for piece in pieces]
    return b"".join(frames)


def _headers() -> bytes:
    """Encodes headers in HPACK (RFC 7541), by indices of the static table and literals that nobody need remember."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            b"\x04" + _literal(_PATH),
            b"\x01" + _literal(b"octavo"),  # :authority
            b"\x0f\x10" + _literal(b"application/grpc"),  # content-type
            b"\x00" + _literal(b"te") + _literal(b"trailers"),
        )
    )


def _literal(value: bytes) -> bytes:
    return bytes([len(value)]) + value


class _Reader:
    """Reads one connection and keeps the messages of its streams with their times. `open` counts the streams that have
    not ended."""

    def __init__(self) -> None:
        self.open = 0
        self.messages: dict[int, list[tuple[float, bytes]]] = {}
        self._buffer = b""
        # Of messages that have not come as a whole, by stream.
        self._begun: dict[int, bytes] = {}

    def feed(self, at: float, data: bytes) -> bytes:
        """Reads `data`, which came at the time `at`, and returns the bytes to send back. Raises `ConnectionError` if
        the server ends a stream early."""
        answers = []
        for kind, flags, stream, payload in self._frames(data):
            if kind == _DATA:
                self._take(at, stream, payload)
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                answers.append(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                raise ConnectionError(f"the server has ended stream {stream}: {payload!r}")
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                self.open -= 1
        return b"".join(answers)

    def _frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        buffer, start = self._buffer + data, 0
        while len(buffer) - start >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">HBBBI", buffer, start)
            end = start + 9 + (high << 8 | low)
            if len(buffer) < end:
                break
            yield kind, flags, stream, buffer[start + 9 : end]
            start = end
        self._buffer = buffer[start:]

    def _take(self, at: float, stream: int, payload: bytes) -> None:
        data = self._begun.get(stream, b"") + payload
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5])):
            self.messages.setdefault(stream, []).append((at, data[5:end]))
            data = data[end:]
        self._begun[stream] = data


if __name__ == "__main__":
    run(load)
