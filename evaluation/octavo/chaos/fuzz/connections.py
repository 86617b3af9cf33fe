"""Opens connections of bytes, as a stranger on a port does who does not speak its protocol, or not well."""

import contextlib
import enum
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from octavo.chaos.fuzz.noise import garbage, mutated

_PATIENCE_S: Final = 5.0
_MOST_READ: Final = 1 << 20

Address = Path | tuple[str, int]

HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HTTP2_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
_ZMTP_GREETING: Final = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
_ZMTP_READY: Final = b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"


@contextlib.contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """Opens a connection that is closed after the block, without patience for what is slow."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(_PATIENCE_S)
        client.connect(str(address) if isinstance(address, Path) else address)
        yield client


class Listening(enum.Enum):
    """Names how long to listen to the answer: not at all; until the server ends the connection; or the same with
    nothing more to say, which many servers take for leaving."""

    NOT = enum.auto()
    TO_ITS_END = enum.auto()
    AS_IF_LEAVING = enum.auto()


def say(address: Address, data: bytes, listening: Listening) -> bytes:
    """Sends the bytes over a connection of their own; what was answered."""
    answer = b""
    with contextlib.suppress(OSError), connected(address) as client:
        client.sendall(data)
        if listening is Listening.AS_IF_LEAVING:
            client.shutdown(socket.SHUT_WR)
        while listening is not Listening.NOT and len(answer) < _MOST_READ and (part := client.recv(65536)):
            answer += part
    return answer


def http2_garbage(rng: Random) -> bytes:
    """Returns bytes that are nearly HTTP/2: often its preface, then frames of any type, flags, stream and content."""
    opening = rng.choice([b"", HTTP2_PREFACE, HTTP2_PREFACE + _HTTP2_SETTINGS, HTTP2_PREFACE[:10]])
    return opening + b"".join(_http2_frame(rng) for _ in range(rng.randrange(6))) + garbage(rng, 32)


def _http2_frame(rng: Random) -> bytes:
    content = garbage(rng, 64)
    length = len(content) if rng.random() < 0.9 else rng.randrange(1 << 24)
    stream = rng.choice([0, 1, 2, 3, 5, 2**31 - 1, rng.randrange(2**32)])
    kind, flags = rng.randrange(11), rng.choice([0, 1, 4, 5, rng.randrange(256)])
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def zmtp_garbage(rng: Random) -> bytes:
    """Returns bytes that are nearly ZMTP, the protocol of ZeroMQ: its greeting and handshake, each more or less whole,
    then anything."""
    opening = rng.choice([b"", _ZMTP_GREETING, _ZMTP_GREETING + _ZMTP_READY])
    length = rng.choice([0, 4, 2**31, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "big")
    large = bytes([rng.choice([2, 3, 6])]) + length
    return mutated(rng, opening) + rng.choice([b"", large]) + garbage(rng)
