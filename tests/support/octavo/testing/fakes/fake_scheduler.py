"""A scheduler in name only: speaks the frontends' wire, makes up tokens, and misbehaves on demand."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.runtime.transport.sockets import bind_router
from octavo.testing.fakes.fake_answers import delta_of, letters, total
from octavo.wire.codec import WireError, decode_from_frontend, encode
from octavo.wire.requests import (
    Abort,
    BlockUse,
    Delta,
    Deltas,
    EndSequence,
    FrontendHello,
    FrontendWelcome,
    Notice,
    NoticeKind,
    Notices,
    PinPrefixes,
    PinRefused,
    Prefix,
    PrefixCacheReset,
    PrefixesChanged,
    Refused,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    Request,
    ResetPrefixCache,
    ServiceLoad,
    ServiceStatus,
    StatusChanged,
    Submit,
    ToFrontend,
    Unregistered,
)
from octavo.wire.steps import ModelInfo


class FakeScheduler:
    """Attributes are knobs to be turned between events and records to be read."""

    def __init__(self, endpoint: str, model: ModelInfo) -> None:
        self.endpoint = endpoint
        self.model = model
        self.epoch = secrets.randbits(63)
        self.replicas = 1
        self.capacity_tokens = 100_000
        self.max_parallel = 16
        # Told as work of other frontends.
        self.work_tokens = 0
        self.load = ServiceLoad(0, 0, [BlockUse(16, 100, 0)])
        # The whole answer of a request's sequence; what it has already is left out when it is submitted again.
        self.answer: Callable[[Request, int], list[int]] = letters
        self.tokens_per_delta = 1
        self.pace_s = 0.0
        # Tokens of an answer beyond this many are held back until it is raised.
        self.hold_after = 1 << 30
        # What becomes of a delta on its way: nothing, itself, more.
        self.tamper: Callable[[Delta], list[Delta]] = lambda delta: [delta]
        self.rejection: RejectReason | None = None
        self.refusal: str | None = None
        # Its workers answer no step, as it says with its next word of them.
        self.is_stalled = False
        # Hears and says nothing, but for what is sent raw; its connections stay.
        self.is_frozen = False
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        # Of every sequence that a frontend ended: request, attempt, index.
        self.ended: list[tuple[str, int, int]] = []
        self.pinned: dict[str, list[int]] = {}
        self.unpinnable: set[str] = set()
        # The salts of all resets of the prefix cache, None for those of all.
        self.resets: list[str | None] = []
        self.answers_resets = True
        # The ids of every renewal.
        self.num_hellos = 0
        self.renewals: list[list[str]] = []
        # As the latest frontend to say hello calls itself.
        self.frontend_id = 0
        self.malformed = 0
        self._socket: Any = None
        self._known: set[bytes] = set()
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}

    @property
    def running(self) -> set[str]:
        """Ids of the requests it holds."""
        return set(self._running)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeScheduler"]:
        """Bound and answering inside the block."""
        context = zmq.asyncio.Context()
        self._socket = bind_router(context, self.endpoint)
        loop = asyncio.create_task(self._loop())
        try:
            yield self
        finally:
            self.forget_everything()
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            self._socket.close()
            context.term()

    def restart(self) -> None:
        """Shows frontends a restarted scheduler: another epoch, and nothing known."""
        self.forget_everything()
        self._known.clear()
        self.pinned.clear()
        self.epoch = secrets.randbits(63)

    def forget_everything(self) -> None:
        """Loses all requests, but not its frontends."""
        for _, task in self._running.values():
            task.cancel()
        self._running.clear()

    async def set_replicas(self, replicas: int) -> None:
        """Workers come or go, and the frontends hear of it."""
        self.replicas = replicas
        for frontend in self._known:
            await self._send(frontend, StatusChanged(epoch=self.epoch, status=self._status()))

    async def tell(self, request_id: str, *kinds: NoticeKind, queue_position: int = 0) -> None:
        """Notices about a request that it holds or held, in one message."""
        attempt = next(request.attempt for request in reversed(self.submitted) if request.request_id == request_id)
        notices = [Notice(request_id, attempt, kind, queue_position) for kind in kinds]
        for frontend in self._known:
            await self._send(frontend, Notices(epoch=self.epoch, notices=notices))

    async def send_raw(self, *frames: bytes) -> None:
        """The same frames to every frontend, whatever they are."""
        for frontend in self._known:
            await self._socket.send_multipart([frontend, *frames])

    async def _loop(self) -> None:
        while True:
            frontend, *frames = await self._socket.recv_multipart()
            if self.is_frozen:
                continue
            try:
                message = decode_from_frontend(b"".join(frames))
            except WireError:
                self.malformed += 1
                continue
            await self._receive(frontend, message)

    async def _receive(self, frontend: bytes, message: Any) -> None:
        if self.refusal is not None:
            await self._send(frontend, Refused(detail=self.refusal))
        elif isinstance(message, FrontendHello):
            self.num_hellos += 1
            self._known.add(frontend)
            self.frontend_id = message.frontend_id
            await self._send(frontend, FrontendWelcome(epoch=self.epoch, status=self._status()))
            await self._send(frontend, self._prefixes())
        elif frontend not in self._known or message.epoch != self.epoch:
            await self._send(frontend, Unregistered(epoch=self.epoch))
        elif isinstance(message, Submit):
            await self._submit(frontend, message.request)
        elif isinstance(message, Renew):
            self.renewals.append([lease.request_id for lease in message.live])
            unknown = [lease for lease in message.live if lease.request_id not in self._running]
            await self._send(frontend, Renewed(epoch=self.epoch, unknown=unknown, status=self._status()))
        elif isinstance(message, ResetPrefixCache):
            self.resets.append(message.salt)
            if self.answers_resets:
                await self._send(frontend, PrefixCacheReset(self.epoch, message.serial, 12, 3, len(self.pinned)))
        elif isinstance(message, PinPrefixes):
            await self._pin(frontend, message.prefixes)
        elif isinstance(message, EndSequence):
            self.ended.append((message.request_id, message.attempt, message.sequence_index))
        elif isinstance(message, Abort):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self._drop(request_id)

    async def set_pinned(self, pinned: dict[str, list[int]]) -> None:
        """Pins and unpins as the operator does, and sends the frontends the prefixes."""
        self.pinned = pinned
        for frontend in self._known:
            await self._send(frontend, self._prefixes())

    async def _pin(self, frontend: bytes, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            if prefix.name in self.unpinnable:
                refusal = PinRefused(epoch=self.epoch, name=prefix.name, detail="because the test says so")
                await self._send(frontend, refusal)
            else:
                self.pinned.setdefault(prefix.name, prefix.token_ids)
        await self.set_pinned(self.pinned)

    def _prefixes(self) -> PrefixesChanged:
        return PrefixesChanged(self.epoch, [Prefix(name, token_ids) for name, token_ids in self.pinned.items()])

    async def _submit(self, frontend: bytes, request: Request) -> None:
        self.submitted.append(request)
        if reason := self._rejection(request):
            await self._send(
                frontend,
                Rejected(
                    epoch=self.epoch,
                    request_id=request.request_id,
                    attempt=request.attempt,
                    reason=reason,
                    detail="because the test says so",
                ),
            )
            return
        self._drop(request.request_id)
        task = asyncio.create_task(self._stream(frontend, request))
        self._running[request.request_id] = (request.attempt, task)

    def _rejection(self, request: Request) -> RejectReason | None:
        if request.model_fingerprint != self.model.fingerprint:
            return RejectReason.MODEL_MISMATCH
        return self.rejection

    def _drop(self, request_id: str) -> None:
        if request_id in self._running:
            self._running.pop(request_id)[1].cancel()

    async def _stream(self, frontend: bytes, request: Request) -> None:
        if request.sampling.beam is not None:
            await self._search(frontend, request)
        else:
            await self._generate(frontend, request)
        self._running.pop(request.request_id, None)

    async def _search(self, frontend: bytes, request: Request) -> None:
        """The sequences of a beam search come whole and all at once."""
        while self.hold_after == 0:
            await asyncio.sleep(0.005)
        deltas = []
        for index in range(request.sampling.num_sequences):
            token_ids = self.answer(request, index)
            delta = delta_of(request, index, token_ids, 0, len(token_ids))
            deltas += self.tamper(msgspec.structs.replace(delta, cumulative_logprob=total(token_ids)))
        await self._send(frontend, Deltas(epoch=self.epoch, deltas=deltas))

    async def _generate(self, frontend: bytes, request: Request) -> None:
        """Every step brings some tokens of each sequence that is not held back."""
        generated = [len(sequence.token_ids) for sequence in request.generated]
        positions = generated or [0] * request.sampling.num_sequences
        finished = {index for index, sequence in enumerate(request.generated) if sequence.finished}
        answers = [self.answer(request, index) for index in range(request.sampling.num_sequences)]
        while running := [i for i in range(len(answers)) if i not in finished and positions[i] < len(answers[i])]:
            await asyncio.sleep(self.pace_s)
            deltas = []
            for index in running:
                if (request.request_id, request.attempt, index) in self.ended:
                    finished.add(index)
                elif positions[index] < self.hold_after:
                    end = min(positions[index] + self.tokens_per_delta, self.hold_after)
                    deltas += self.tamper(delta_of(request, index, answers[index], positions[index], end))
                    positions[index] = end
            if deltas:
                await self._send(frontend, Deltas(epoch=self.epoch, deltas=deltas))
            else:
                await asyncio.sleep(0.005)

    def _status(self) -> ServiceStatus:
        model = self.model if self.replicas else None
        return ServiceStatus(
            replicas=self.replicas,
            model=model,
            capacity_tokens=self.capacity_tokens if self.replicas else 0,
            max_parallel=self.max_parallel,
            work_tokens=self.work_tokens,
            stalled=self.is_stalled,
            load=self.load,
        )

    async def _send(self, frontend: bytes, message: ToFrontend) -> None:
        if self.is_frozen:
            return
        # A frontend that has gone is no concern of the others.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([frontend, encode(message)])
