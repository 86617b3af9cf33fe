"""Plays a scheduler that computes nothing and keeps time: `python -m octavo.bench.frontend.paced_scheduler SETUP`.

It waits for an order on stdin, a line of JSON, and holds what is submitted until there is as much as the order says.
Then it sends each request a token at every beat, all of a beat to one frontend in one message, as a step does, and
writes two lines of JSON: one as it begins, and when each beat was sent once all is sent. Times are of the monotonic
clock, which all processes of a machine share.
"""

import json
import sys
import time
from typing import Any, Final

import zmq

from octavo.runtime.transport.sockets import bind_router
from octavo.wire import history
from octavo.wire.codec import decode_from_frontend, encode
from octavo.wire.requests import (
    Delta,
    Deltas,
    FinishReason,
    FrontendHello,
    FrontendWelcome,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    Request,
    ServiceStatus,
    Submit,
)
from octavo.wire.steps import ModelInfo

_EPOCH: Final = 1
# Before the order of a load there is nothing to wait for but messages.
_IDLE_MS: Final = 1000


class PacedScheduler:
    """Answers every request with the same tokens, `token_ids` over and over, in steps that keep time."""

    def __init__(self, socket: "zmq.Socket[bytes]", model: ModelInfo, token_ids: list[int]) -> None:
        self._socket = socket
        self._status = ServiceStatus(1, model, capacity_tokens=1 << 24, max_parallel=1)
        self._token_ids = token_ids
        self._held: dict[bytes, list[Request]] = {}
        self._interval_s = 0.0
        self._streams = 0
        self._rejects = False
        self._hash = history.EMPTY
        self._sent: list[float] = []
        self._began = 0.0

    def serve(self) -> None:
        """Serves frontends and orders until stdin is closed."""
        poller: zmq.Poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._wait_ms()))
            if sys.stdin.fileno() in ready:
                if not (line := sys.stdin.readline()):
                    return
                self._order(**json.loads(line))
            if self._socket in ready:
                self._receive(*self._socket.recv_multipart())
            self._beat_if_due()

    def _order(self, streams: int, interval_s: float, *, rejects: bool = False) -> None:
        self._streams, self._interval_s, self._rejects = streams, interval_s, rejects
        self._held.clear()

    @property
    def _is_playing(self) -> bool:
        return bool(self._streams) and sum(map(len, self._held.values())) == self._streams

    def _due_at(self) -> float:
        return self._began + len(self._sent) * self._interval_s

    def _wait_ms(self) -> int:
        return max(0, int(1000 * (self._due_at() - time.monotonic()))) if self._is_playing else _IDLE_MS

    def _receive(self, frontend: bytes, frame: bytes) -> None:
        match decode_from_frontend(frame):
            case FrontendHello():
                self._send(frontend, FrontendWelcome(_EPOCH, self._status))
            case Renew():
                self._send(frontend, Renewed(_EPOCH, [], self._status))
            case Submit(request=request) if self._rejects:
                full = RejectReason.QUEUE_FULL
                self._send(frontend, Rejected(_EPOCH, request.request_id, request.attempt, full, "the queue is full"))
            case Submit(request=request):
                self._held.setdefault(frontend, []).append(request)
                if self._is_playing:
                    self._began, self._sent, self._hash = time.monotonic(), [], history.EMPTY
                    print(json.dumps({"began": self._began}), flush=True)

    def _beat_if_due(self) -> None:
        if not self._is_playing or time.monotonic() < self._due_at():
            return
        step = len(self._sent)
        token_id = self._token_ids[step % len(self._token_ids)]
        frames = [(frontend, self._step(held, step, token_id)) for frontend, held in self._held.items()]
        self._sent.append(time.monotonic())
        for frontend, frame in frames:
            self._socket.send_multipart([frontend, frame])
        self._hash = history.extend(self._hash, (token_id,))
        if len(self._sent) == next(iter(self._held.values()))[0].sampling.max_tokens:
            print(json.dumps({"sent": self._sent}), flush=True)
            self._streams = 0
            self._held.clear()

    def _step(self, held: list[Request], step: int, token_id: int) -> bytes:
        return encode(
            Deltas(
                _EPOCH,
                [
                    Delta(
                        request_id=request.request_id,
                        attempt=request.attempt,
                        sequence_index=0,
                        start_index=step,
                        previous_hash=self._hash,
                        token_ids=[token_id],
                        finish_reason=FinishReason.LENGTH if step + 1 == request.sampling.max_tokens else None,
                        preemptions=0,
                        swaps=0,
                        cached_prompt_tokens=0,
                    )
                    for request in held
                ],
            )
        )

    def _send(self, frontend: bytes, message: Any) -> None:
        self._socket.send_multipart([frontend, encode(message)])


def main() -> None:
    setup = json.loads(sys.argv[1])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_router(context, setup["endpoint"])
    print(json.dumps({"ready": True}), flush=True)
    PacedScheduler(socket, ModelInfo(**setup["model"]), setup["token_ids"]).serve()


if __name__ == "__main__":
    main()
