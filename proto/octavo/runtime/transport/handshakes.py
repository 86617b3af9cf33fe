"""Admits peers to the scheduler's sockets by their keys, and explains failed handshakes at either end.

Both work on threads that end with their ZMQ context, so that a busy event loop keeps nobody waiting for admission.
"""

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from octavo.runtime.transport.curve_keys import ServerKeys

_log = logging.getLogger(__name__)

# Where libzmq asks whether a peer may come in, once in every context (ZeroMQ's RFC 27).
_GATE = "inproc://zeromq.zap.01"
_COMPLAINT_INTERVAL_S = 10.0
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_FAILURES |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Complaints:
    """Log lines of one kind, at most one in ten seconds; each says how many there were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = float("-inf")
        self.count = 0

    def add(self, text: str) -> None:
        self.count += 1
        if (now := self._clock()) >= self._next:
            self._next = now + _COMPLAINT_INTERVAL_S
            _log.warning("%s (%d so far)", text, self.count)


def domain_of(keys: ServerKeys) -> bytes:
    """Returns the ZAP domain of a socket, which names whom it lets in, so that the gate need know nothing else."""
    return f"{keys.admits} ".encode() + keys.admitted


def open_gate(context: "zmq.Context[Any]") -> None:
    """Lets peers into the sockets of this context by their domains. Once is enough, and twice does no harm."""
    gate: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.REP)
    gate.setsockopt(zmq.LINGER, 0)
    try:
        gate.bind(_GATE)
    except zmq.ZMQError as error:
        gate.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return
    _run("curve-gate", gate, _Gate().answer)


class _Gate:
    def __init__(self) -> None:
        self._complaints = Complaints()

    def answer(self, gate: "zmq.Socket[bytes]") -> bool:
        version, request_id, domain, address, _, mechanism, *credentials = gate.recv_multipart()
        admits, _, admitted = domain.partition(b" ")
        let_in = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) == admitted
        verdict = [b"200", b"", admits] if let_in else [b"400", b"unknown key", b""]
        gate.send_multipart([version, request_id, *verdict, b""])
        if not let_in:
            self._complaints.add(f"kept out a peer at {address.decode()!r}: its key is not the {admits.decode()}'s")
        return True


def watch_handshakes(
    context: "zmq.Context[Any]",
    socket: "zmq.Socket[Any]",
    explain: "Explain",
    on_disconnect: Callable[[], None] | None = None,
) -> None:
    """Logs what `explain` makes of each failed handshake of a socket, seldom; None is not worth a line. Calls
    `on_disconnect`, on a thread of its own, when a connection has ended."""
    name = f"inproc://handshakes-{secrets.token_hex(8)}"
    ends = zmq.EVENT_DISCONNECTED if on_disconnect else 0
    socket.monitor(name, _FAILURES | zmq.EVENT_MONITOR_STOPPED | ends)
    events: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.PAIR)
    # libzmq would wait for a reader that has fallen behind.
    events.setsockopt(zmq.RCVHWM, 0)
    events.setsockopt(zmq.LINGER, 0)
    events.connect(name)
    _run("handshakes", events, _Watch(explain, on_disconnect).read)


Explain = Callable[[int, int], str | None]


class _Watch:
    def __init__(self, explain: Explain, on_disconnect: Callable[[], None] | None) -> None:
        self._explain = explain
        self._on_disconnect = on_disconnect
        self._complaints = Complaints()

    def read(self, events: "zmq.Socket[bytes]") -> bool:
        message = parse_monitor_message(events.recv_multipart())
        if message["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        if message["event"] == zmq.EVENT_DISCONNECTED:
            if self._on_disconnect:
                self._on_disconnect()
        elif text := self._explain(message["event"], message["value"]):
            self._complaints.add(text)
        return True


def explain_to_server(endpoint: str, keys: ServerKeys | None) -> Explain:
    """Returns a function that explains failed handshakes at the scheduler's `endpoint`. It returns None where the
    endpoint has no keys, and for a wrong key, of which the gate has logged more."""

    def explain(event: int, value: int) -> str | None:
        if keys is None or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return None
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return f"kept out a peer at {endpoint}: it has no keys; a {keys.admits} needs --curve-keys"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return f"kept out a peer at {endpoint}: its scheduler.public is not the public key of this scheduler"
        return f"kept out a peer at {endpoint}: it broke the handshake off, or is no {keys.admits} at all"

    return explain


def explain_to_client(endpoint: str, has_keys: bool) -> Explain:
    """Returns a function that explains, as far as the handshake tells, why a frontend or a worker is not admitted."""

    def explain(event: int, value: int) -> str:
        # Where one side alone has keys, either may be the first to hang up.
        mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            why = "it does not know this process's key; copy the key files from one run of `octavo keys`"
        elif mismatch and has_keys:
            why = "it has no keys and this process has; give it --curve-keys too"
        elif mismatch:
            why = "it has keys and this process has none; give --curve-keys"
        elif has_keys:
            why = "the handshake broke off; scheduler.public may be the key of another, or this one may have none"
        else:
            why = "the handshake broke off; if it has keys, give --curve-keys"
        return f"the scheduler at {endpoint} does not let this process in: {why}"

    return explain


def _run(name: str, socket: "zmq.Socket[bytes]", turn: "Callable[[zmq.Socket[bytes]], bool]") -> None:
    """Calls `turn` on a thread of its own until it says False or the context ends, and closes the socket."""

    def run() -> None:
        try:
            while turn(socket):
                pass
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()

    threading.Thread(target=run, name=name, daemon=True).start()
