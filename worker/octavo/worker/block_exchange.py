"""The sockets between workers: one thread answers other workers' reads of blocks and carries this one's to them.

The main thread computes for as long as a step takes, and would let others wait. What is sent is not copied first:
blocks that others are told to read are written to by nobody meanwhile, and an incarnation that ends in between is one
that nobody relies on.
"""

import contextlib
import hashlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import zmq

from octavo.runtime.transport.curve_keys import ClientKeys, ServerKeys
from octavo.runtime.transport.endpoints import EndpointError, is_loopback, runtime_directory
from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.runtime.transport.wakeup import Wakeup
from octavo.wire.codec import WireError, decode_from_peer, decode_to_peer, encode
from octavo.wire.peers import ReadBlocks
from octavo.worker.block_pulls import Answer, Peek, answer_to

logger = logging.getLogger(__name__)

_POLL_MS = 1_000
# Connections to other workers; beyond that the one that was not used for longest ends, as of a worker that is gone.
_MAX_CONNECTIONS = 64


def chosen_endpoint(asked_for: str, scheduler: str, worker_id: str) -> str:
    """Returns where to serve others: what was `asked_for`, else an address of the kind at which the scheduler is met,
    on the interface that leads there. Raises `OSError` if the scheduler's host has no address."""
    if asked_for:
        return asked_for
    parts = urlsplit(scheduler)
    if parts.scheme == "ipc":
        name = hashlib.sha256(worker_id.encode()).hexdigest()[:12]
        return f"ipc://{runtime_directory()}/blocks-{name}.sock"
    host = parts.hostname or "localhost"
    return f"tcp://{'127.0.0.1' if is_loopback(host) else _own_address(host)}:*"


def _own_address(host: str) -> str:
    """Returns the address of this machine that others near `host` reach. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


class BlockExchange:
    """Is an `octavo.worker.block_pulls.Exchange` over ZMQ; use it as a context manager. `keys` are those of workers,
    which admit each other. Raises `zmq.ZMQError` if `endpoint` cannot be used."""

    def __init__(self, endpoint: str, peek: Peek, keys: ClientKeys | None) -> None:
        self.incarnation = 0
        self._peek = peek
        self._keys = None if keys is None else ClientKeys(keys.public, keys.secret, keys.public)
        self._context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        locks = None if keys is None else ServerKeys("worker", keys.secret, keys.public)
        try:
            self._router = bind_router(self._context, endpoint, locks)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._dealers: dict[str, zmq.Socket[Any]] = {}
        self._to_ask: deque[tuple[str, ReadBlocks]] = deque()
        # Reads that no connection has taken yet.
        self._waiting: dict[str, deque[bytes]] = {}
        self._answers: deque[Answer] = deque()
        # They wake the thread, to ask or to end; and the main thread, for answers.
        self._asking, self._arrived = Wakeup(), Wakeup()
        self._is_over = False
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="block-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the sockets."""
        self._is_over = True
        self._asking.ring()
        self._thread.join()
        self._asking.close()
        self._arrived.close()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there may be answers."""
        return self._arrived.fileno()

    def ask(self, endpoint: str, read: ReadBlocks) -> None:
        """Sends a read to another worker; whether it arrives nobody knows before its answer."""
        self._to_ask.append((endpoint, read))
        self._asking.ring()

    def answers(self) -> list[Answer]:
        """Returns the answers that have come since the last call."""
        self._arrived.heard()
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._asking, zmq.POLLIN)
        try:
            while not self._is_over:
                ready = dict(self._poller.poll(_POLL_MS))
                self._asking.heard()
                if self._router in ready:
                    self._serve()
                for endpoint, dealer in list(self._dealers.items()):
                    if ready.get(dealer, 0) & zmq.POLLIN:
                        self._receive(dealer)
                    if self._waiting[endpoint]:
                        self._send(endpoint)
                while self._to_ask:
                    self._begin(*self._to_ask.popleft())
        except Exception:
            # Nobody waits for it in vain: reads that nobody answers are given up.
            logger.exception("blocks are read by and from no other worker any more")
        finally:
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        """Answers one read; what is none is dropped."""
        peer, *frames = self._router.recv_multipart()
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames instead of one")
            header, payloads = answer_to(decode_to_peer(frames[0]), self.incarnation, self._peek)
        except WireError as error:
            logger.warning("dropped a malformed read of blocks: %s", error)
            return
        # Of a reader that is gone, or reads nothing, the pull is given up at its end.
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, encode(header), *payloads], zmq.NOBLOCK, copy=False)

    def _begin(self, endpoint: str, read: ReadBlocks) -> None:
        """Sends a read, over a new connection if there is none."""
        try:
            dealer = self._dealers.pop(endpoint, None) or connect_dealer(self._context, endpoint, self._keys)
        except (zmq.ZMQError, EndpointError) as error:
            logger.warning("cannot read blocks at %s: %s", endpoint, error)
            return
        self._dealers[endpoint] = dealer
        self._waiting.setdefault(endpoint, deque()).append(encode(read))
        self._send(endpoint)
        if len(self._dealers) > _MAX_CONNECTIONS:
            oldest = next(iter(self._dealers))
            del self._waiting[oldest]
            self._poller.unregister(self._dealers[oldest])
            self._dealers.pop(oldest).close()

    def _send(self, endpoint: str) -> None:
        dealer, waiting = self._dealers[endpoint], self._waiting[endpoint]
        with contextlib.suppress(zmq.Again):
            while waiting:
                dealer.send(waiting[0], zmq.NOBLOCK)
                waiting.popleft()
        self._poller.register(dealer, zmq.POLLIN | zmq.POLLOUT if waiting else zmq.POLLIN)

    def _receive(self, dealer: "zmq.Socket[Any]") -> None:
        header, *payloads = dealer.recv_multipart(copy=False)
        try:
            answer = decode_from_peer(header.bytes)
        except WireError as error:
            logger.warning("dropped a malformed answer to a read of blocks: %s", error)
            return
        self._answers.append((answer, [frame.buffer for frame in payloads]))
        self._arrived.ring()


@contextmanager
def opened_exchange(endpoint: str, peek: Peek, keys: ClientKeys | None) -> Iterator[BlockExchange]:
    """Holds an exchange open within the block. Raises `zmq.ZMQError` if `endpoint` cannot be used."""
    exchange = BlockExchange(endpoint, peek, keys)
    try:
        yield exchange
    finally:
        exchange.close()
        if exchange.endpoint.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(exchange.endpoint.removeprefix("ipc://"))
