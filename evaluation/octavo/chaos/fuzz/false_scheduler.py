"""Attacks what frontends and workers take from their scheduler: it is gone, and something else has its place."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, Final, get_args

import msgspec
import zmq

from octavo.chaos.fuzz.noise import Composer, garbage, mutated
from octavo.chaos.fuzz.strangers import status_of
from octavo.chaos.fuzz.target import impatient_crowd
from octavo.runtime.transport.sockets import bind_router
from octavo.testbed.stack import Stack
from octavo.wire import history
from octavo.wire.codec import WireError, decode_from_frontend, decode_from_worker, encode
from octavo.wire.requests import FrontendHello, FrontendWelcome, Refused, ServiceStatus, Submit, ToFrontend
from octavo.wire.steps import StepPlan, ToWorker, WorkerDismissed, WorkerHello, WorkerRefused, WorkerWelcome

_EPOCH: Final = 4711
_PEER_MS: Final = 20_000
_KEPT: Final = 16
# A refusal ends the process, as it should, and so does a dismissal.
_FRONTEND_KINDS: Final = tuple(kind for kind in get_args(ToFrontend) if kind is not Refused)
_WORKER_KINDS: Final = tuple(kind for kind in get_args(ToWorker) if kind not in (WorkerRefused, WorkerDismissed))


def false_scheduler(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Sends half of the messages to the frontend, half to the worker; then the scheduler is back."""
    status = status_of(stack)
    stack.kill("scheduler", signal.SIGTERM)
    sent: Counter[str] = Counter()
    try:
        with _in_place_of(stack, "frontends") as socket, impatient_crowd(stack, Random(rng.random())):
            sent += _Frontends(socket, rng, status).send(messages // 2)
        with _in_place_of(stack, "workers") as socket:
            sent += _Workers(socket, rng).send(messages - messages // 2)
    finally:
        stack.start("scheduler")
        stack.wait_ready()
        stack.wait_for(lambda: len(stack.load().workers) == 1)
    return sent


@contextmanager
def _in_place_of(stack: Stack, name: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, bind_router(context, f"ipc://{stack.directory}/{name}.sock") as socket:
        yield socket


class _FalseScheduler:
    """Sends anything to the peer that says hello, about what that peer has spoken of."""

    kinds: tuple[Any, ...] = ()

    def __init__(self, socket: "zmq.Socket[bytes]", rng: Random) -> None:
        self._socket, self._rng = socket, rng
        self._composer = Composer(rng, {"epoch": (_EPOCH,)}, wrong=0.002)
        self._peer: bytes | None = None

    def send(self, messages: int) -> Counter[str]:
        sent: Counter[str] = Counter()
        for _ in range(messages):
            self._listen(0)
            while self._peer is None:
                self._listen(_PEER_MS)
            kind = self._rng.choice(self.kinds)
            if self._send(self._bytes(kind)):
                sent[kind.__name__] += 1
        return sent

    def _bytes(self, kind: Any) -> bytes:
        self._before(kind)
        match self._rng.randrange(10):
            case 0:
                return garbage(self._rng)
            case 1:
                return mutated(self._rng, self._composer.frame(kind))
        return self._composer.frame(kind)

    def _send(self, frame: bytes) -> bool:
        assert self._peer is not None
        self._socket.setsockopt(zmq.SNDTIMEO, _PEER_MS)
        try:
            self._socket.send_multipart([self._peer, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._peer = None
            return False
        return True

    def _listen(self, wait_ms: int) -> None:
        assert self._socket.poll(wait_ms) or not wait_ms, "nobody says hello"
        while self._socket.poll(0):
            peer, frame = self._socket.recv_multipart()
            with suppress(WireError):
                self._take(peer, frame)

    def _welcome(self, peer: bytes, welcome: Any) -> None:
        self._peer = peer
        self._send(encode(welcome))

    def _before(self, kind: Any) -> None:
        """Learns what the next message of `kind` needs."""

    def _take(self, peer: bytes, frame: bytes) -> None:
        raise NotImplementedError


class _Frontends(_FalseScheduler):
    kinds = _FRONTEND_KINDS

    def __init__(self, socket: "zmq.Socket[bytes]", rng: Random, status: ServiceStatus) -> None:
        super().__init__(socket, rng)
        self._status = status
        self._composer.known |= {
            "status": (_plain(status),),
            "start_index": (0, 1),
            "previous_hash": (history.EMPTY,),
            "token_ids": ([5], [6, 7], [300], []),
            "sequence_index": (0, 1, 2),
        }

    def _take(self, peer: bytes, frame: bytes) -> None:
        match decode_from_frontend(frame):
            case FrontendHello():
                self._welcome(peer, FrontendWelcome(_EPOCH, self._status))
            case Submit(request=request):
                known = self._composer.known
                known["request_id"] = (*known.get("request_id", ())[-_KEPT:], request.request_id)
                known["attempt"] = (*known.get("attempt", ())[-_KEPT:], request.attempt)


class _Workers(_FalseScheduler):
    kinds = (*_WORKER_KINDS, *[StepPlan] * 20)

    def __init__(self, socket: "zmq.Socket[bytes]", rng: Random) -> None:
        super().__init__(socket, rng)
        self._step_id = 0
        self._composer.known |= {
            "sequence_id": tuple(range(1, 9)),
            "parent_id": tuple(range(1, 9)),
            "answered_step_id": (2**53,),
            "prompt_token_ids": ([1, 2, 3], [5] * 20),
            "generated_token_ids": ([], [7]),
            "num_computed": (0, 1),
            "num_tokens": (1, 2, 3, 4),
            "new_block_ids": ([], [[1]], [[2, 3]]),
            "max_tokens": (1, 50),
            "grammar": ("", "", "("),
            "moves": ([[], [], []], [[], [], [[1, 2]]]),
        }

    def _before(self, kind: Any) -> None:
        if kind is StepPlan:
            self._step_id += 1
            self._composer.known["step_id"] = (self._step_id,)

    def _take(self, peer: bytes, frame: bytes) -> None:
        match decode_from_worker(frame):
            case WorkerHello(incarnation=incarnation):
                self._step_id = 0
                self._composer.known["incarnation"] = (incarnation,)
                self._welcome(peer, WorkerWelcome(_EPOCH))


def _plain(value: Any) -> Any:
    """Returns a struct as the list that it is on the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
