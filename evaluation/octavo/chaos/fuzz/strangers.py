"""Attacks the scheduler's two sockets, by peers that it does not know, and by some that it has let in."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, Final, get_args

import zmq

from octavo.chaos.fuzz.connections import Listening, say, zmtp_garbage
from octavo.chaos.fuzz.noise import Composer, Known, garbage, mutated
from octavo.chaos.fuzz.target import impatient_crowd
from octavo.runtime.transport.sockets import connect_dealer
from octavo.testbed.stack import Stack
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.codec import WireError, decode_to_frontend, decode_to_worker, encode
from octavo.wire.requests import FromFrontend, FrontendHello, FrontendWelcome, PinPrefixes, ServiceStatus, Unregistered
from octavo.wire.steps import (
    FromWorker,
    KVGroup,
    ModelInfo,
    StepPlan,
    StepResult,
    WorkerGoodbye,
    WorkerHello,
    WorkerUnregistered,
    WorkerWelcome,
)

_SEND_MS: Final = 5_000
_REQUEST_IDS: Final = tuple("abcdef")
_FRONTEND_KINDS: Final = get_args(FromFrontend)
_WORKER_KINDS: Final = get_args(FromWorker)
# Every so many messages what has come is read, as one must who wants to stay connected.
_READ_EVERY: Final = 64


@contextmanager
def dealer(stack: Stack, name: str) -> Iterator["zmq.Socket[bytes]"]:
    """Connects to the scheduler's socket called `name`."""
    with zmq.Context() as context, connect_dealer(context, f"ipc://{stack.directory}/{name}.sock") as socket:
        socket.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        yield socket


def received(socket: "zmq.Socket[bytes]", wait_ms: int = 0) -> Iterator[bytes]:
    """Returns the last frames of all messages that have come, or do so within `wait_ms`."""
    while socket.poll(wait_ms):
        yield socket.recv_multipart()[-1]
        wait_ms = 0


def unknown_peers(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Sends frames of strangers to both sockets, one in eight over a connection that hardly speaks ZeroMQ's
    protocol."""
    sent: Counter[str] = Counter()
    composer = Composer(rng, {"schema_version": (SCHEMA_VERSION, SCHEMA_VERSION + 1)})
    with dealer(stack, "frontends") as frontends, dealer(stack, "workers") as workers:
        for number in range(messages):
            socket, kinds = rng.choice([(frontends, _FRONTEND_KINDS), (workers, _WORKER_KINDS)])
            if rng.random() < 1 / 8:
                name = rng.choice(["frontends", "workers"])
                say(stack.directory / f"{name}.sock", zmtp_garbage(rng), Listening.NOT)
                sent["connections"] += 1
            else:
                socket.send_multipart(_frames(rng, composer, rng.choice(kinds)))
                sent["frames"] += 1
            if number % _READ_EVERY == 0:
                sent["answers"] += sum(1 for each in (frontends, workers) for _ in received(each))
    return sent


def _frames(rng: Random, composer: Composer, kind: Any) -> list[bytes]:
    match rng.randrange(6):
        case 0:
            return [garbage(rng)]
        case 1:
            return [garbage(rng, 8) for _ in range(rng.randint(1, 5))]
        case 2 | 3:
            return [mutated(rng, composer.frame(kind))]
        case _:
            return [composer.frame(kind)]


def false_frontend(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Plays a frontend that is let in and then says anything: requests that contradict themselves, ends of what never
    was."""
    sent: Counter[str] = Counter()
    with dealer(stack, "frontends") as socket:
        welcome = join_as_frontend(socket, rng)
        assert welcome.status.model is not None
        composer = Composer(rng, _known_to_frontend(welcome, welcome.status.model))
        # What a frontend pins stays, so that few do.
        kinds = [kind for kind in _FRONTEND_KINDS if kind not in (PinPrefixes, FrontendHello)]
        for number in range(messages):
            kind = PinPrefixes if rng.random() < 0.001 else rng.choice(kinds)
            frame = composer.frame(kind)
            socket.send(mutated(rng, frame) if rng.random() < 0.1 else frame)
            sent[kind.__name__] += 1
            if number % _READ_EVERY == 0 and _is_forgotten(socket):
                composer.known.update(_known_to_frontend(join_as_frontend(socket, rng), welcome.status.model))
                sent["joined anew"] += 1
    return sent


def _is_forgotten(socket: "zmq.Socket[bytes]") -> bool:
    return any(isinstance(decode_to_frontend(frame), Unregistered) for frame in list(received(socket)))


def join_as_frontend(socket: "zmq.Socket[bytes]", rng: Random) -> FrontendWelcome:
    """Says hello under a new name, and waits for the welcome."""
    socket.send(encode(FrontendHello(SCHEMA_VERSION, rng.getrandbits(63))))
    while True:
        assert socket.poll(_SEND_MS), "the scheduler does not answer a hello"
        for frame in received(socket):
            if isinstance(message := decode_to_frontend(frame), FrontendWelcome):
                return message


def status_of(stack: Stack) -> ServiceStatus:
    """Returns the status that the scheduler sends to frontends."""
    with dealer(stack, "frontends") as socket:
        return join_as_frontend(socket, Random()).status


def _known_to_frontend(welcome: FrontendWelcome, model: ModelInfo) -> Known:
    return {
        "epoch": (welcome.epoch,),
        "request_id": _REQUEST_IDS,
        "model_fingerprint": (model.fingerprint,),
        "attempt": tuple(range(1, 9)),
        "prompt_token_ids": ([1, 2, 3], [5] * 40),
        "max_tokens": (1, 7, 50),
        "min_tokens": (0,),
        "grammar": ("",),
        "tenant": ("", "x", "y"),
        "traceparent": ("",),
        "sequence_index": (0, 1),
    }


def false_worker(stack: Stack, rng: Random, messages: int) -> Counter[str]:
    """Plays a worker that is let in and answers plans with anything."""
    sent: Counter[str] = Counter()
    model = status_of(stack).model
    assert model is not None
    with impatient_crowd(stack, Random(rng.random())), dealer(stack, "workers") as socket:
        worker = _FalseWorker(socket, rng, model)
        for _ in range(messages):
            sent[worker.turn()] += 1
        worker.leave()
    return sent


class _FalseWorker:
    def __init__(self, socket: "zmq.Socket[bytes]", rng: Random, model: ModelInfo) -> None:
        self._socket, self._rng, self._model = socket, rng, model
        self._composer = Composer(rng)
        self._is_in = False

    def turn(self) -> str:
        """Reads what has come and says one thing; the name of that."""
        for frame in received(self._socket, 1):
            with suppress(WireError):
                self._take(decode_to_worker(frame))
        kind: Any = self._rng.choices([StepResult, *_WORKER_KINDS], [20, 0.2, 5, 5, 5, 1, 0.2])[0]
        if not self._is_in:
            kind = WorkerHello
            self._socket.send(encode(self._hello()))
            self._is_in = self._socket.poll(200) != 0
        else:
            self._socket.send(self._composer.frame(kind))
        return str(kind.__name__)

    def leave(self) -> None:
        """Says goodbye, truthfully."""
        known = self._composer.known
        if self._is_in and "epoch" in known:
            self._socket.send(encode(WorkerGoodbye(known["epoch"][0], known["incarnation"][0])))

    def _hello(self) -> WorkerHello:
        incarnation = self._rng.getrandbits(63)
        self._composer.known = {"incarnation": (incarnation,), "schema_version": (SCHEMA_VERSION,)}
        ids = (incarnation, incarnation)
        return WorkerHello(SCHEMA_VERSION, "false", *ids, self._model, "fake", 1, 64, 0, 16, 64, [KVGroup(0)])

    def _take(self, message: Any) -> None:
        known = self._composer.known
        match message:
            case WorkerWelcome(epoch):
                known["epoch"] = (epoch,)
            case WorkerUnregistered():
                self._is_in = False
            case StepPlan():
                known["step_id"] = (message.step_id,)
                known["sequence_id"] = tuple(work.sequence_id for work in message.work) or (0,)
