"""The scheduler's gRPC server: health and the Admin service, answered from the core's own books."""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.runtime.transport.grpc_reading import READING_OPTIONS, ReadingInterceptor
from octavo.scheduler.core.events import (
    CacheReset,
    Event,
    PrefixPinned,
    PrefixUnpinned,
    QuarantineCleared,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.explain import explain, homes_of_groups
from octavo.scheduler.core.replica import Replica, ReplicaState
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.server.admin_messages import (
    Snapshots,
    read_state,
    write_blocks,
    write_ended,
    write_explanation,
    write_load,
    write_prefix,
    write_quarantined,
    write_status,
)
from octavo.scheduler.server.event_log import StepFeed
from octavo.scheduler.server.health import SERVICE, HealthServicer
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services
from octavo.wire.base import MAX_TOKENS
from octavo.wire.requests import Prefix

_log = logging.getLogger(__name__)

_MAX_PAGE = 1000
_MAX_NAME_LENGTH = 256
# Milliseconds between two answers of WatchBlocks: by default, at least, at most.
_INTERVAL_MS, _MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 1000, 100, 60_000
_MAX_TOKEN_ID = 2**31 - 1
_MAX_GRACE_S = 86_400.0

Context = grpc.aio.ServicerContext[Any, Any]


class Operated(Protocol):
    """The part of the shell that the Admin service needs: the core, and a way to give it events."""

    @property
    def core(self) -> Scheduler: ...
    @property
    def dropped_messages(self) -> int: ...
    def now(self) -> float: ...
    def handle(self, event: Event) -> None: ...


class AdminService(services.AdminServiceServicer):
    """Answers operators. It runs in the shell's event loop, so the books it reads are never half changed."""

    def __init__(self, shell: Operated, feed: StepFeed) -> None:
        self._shell = shell
        self._feed = feed
        self._blocks = Snapshots(self._read_blocks, shell.now)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return write_load(self._shell.core, self._shell.dropped_messages)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        core, now = self._shell.core, self._shell.now()
        try:
            found = _select(core, request)
        except ValueError as error:
            await _refuse(context, str(error))
        size = min(request.page_size or _MAX_PAGE, _MAX_PAGE)
        page = found[:size]
        return pb.ListRequestsResponse(
            requests=_statuses(core, page, now),
            next_page_token=str(_serial(page[-1])) if len(found) > size else "",
        )

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Context) -> pb.ExplainRequestResponse:
        now, core = self._shell.now(), self._shell.core
        asker = request.asker if request.HasField("asker") else None
        told = [
            write_explanation(each, _target(core, each.group), core.state.explain_cache_of(each.group, asker), now)
            for each in explain(core.state, core.policy, request.request_id, now)
        ]
        if not told:
            ended = core.state.lookups.of(request.request_id)
            told = [write_ended(each, core.state.explain_cache(each, asker), now) for each in ended]
        if not told:
            what = f"no request {request.request_id!r} is held: it has ended, or never came here"
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        return pb.ExplainRequestResponse(explanations=told)

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Context) -> None:
        """Streams records of the scheduler's steps. A write waits until there is room on the connection; records that
        come meanwhile wait in the feed, or are missed."""
        async with contextlib.aclosing(self._feed.follow(request.from_step)) as entries:
            async for entry in entries:
                await context.write(pb.WatchStepsResponse(step=entry.number, record=entry.record, missed=entry.missed))

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Context) -> None:
        """Streams readings of all blocks. Nothing is kept for a reader: a slow one gets fewer. So do all while a
        reading is so large that it would keep the scheduler from its work."""
        interval_ms = request.interval_ms or _INTERVAL_MS
        if not _MIN_INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
            allowed = f"use {_MIN_INTERVAL_MS} to {_MAX_INTERVAL_MS}, or 0 for {_INTERVAL_MS}"
            await _refuse(context, f"interval_ms is {interval_ms}; {allowed}")
        while True:
            await context.write(self._blocks.latest())
            await asyncio.sleep(max(interval_ms / 1000, self._blocks.seconds_to_next))

    def _read_blocks(self) -> pb.WatchBlocksResponse:
        core, now = self._shell.core, self._shell.now()
        first = heapq.nsmallest(_MAX_PAGE, core.groups, key=_serial)
        return pb.WatchBlocksResponse(
            load=write_load(core, self._shell.dropped_messages),
            workers=[write_blocks(replica) for replica in core.replicas.values()],
            requests=_statuses(core, first, now),
        )

    async def CordonWorker(self, request: pb.CordonWorkerRequest, context: Context) -> pb.CordonWorkerResponse:
        await self._find_worker(request.worker_id, context)
        _log.info("worker %s is cordoned", request.worker_id)
        self._shell.handle(WorkerCordoned(request.worker_id))
        return pb.CordonWorkerResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else None
        if grace_s is not None and not 0.0 <= grace_s <= _MAX_GRACE_S:
            await _refuse(context, f"grace is {grace_s} s; use 0 to {_MAX_GRACE_S:.0f}, or none for --drain-grace")
        await self._find_worker(request.worker_id, context)
        if self._shell.core.replica_of_worker(request.worker_id) is None:
            await _object(context, f"worker {request.worker_id} is not there, so there is nothing to drain")
        _log.info("worker %s is to be drained", request.worker_id)
        self._shell.handle(WorkerDrained(request.worker_id, grace_s))
        return pb.DrainWorkerResponse()

    async def ReadmitWorker(self, request: pb.ReadmitWorkerRequest, context: Context) -> pb.ReadmitWorkerResponse:
        await self._find_worker(request.worker_id, context)
        if objection := _readmission_objection(self._shell.core, request.worker_id):
            await _object(context, objection)
        _log.info("worker %s is readmitted", request.worker_id)
        self._shell.handle(WorkerReadmitted(request.worker_id))
        return pb.ReadmitWorkerResponse()

    async def _find_worker(self, worker_id: str, context: Context) -> None:
        """Refuses a name that belongs to no worker and to no cordon."""
        replica_table = self._shell.core.replica_table
        known = {replica.hello.worker_id for replica in replica_table.replicas.values()} | replica_table.cordoned
        if worker_id not in known:
            names = f"there are {', '.join(sorted(known))}" if known else "there is none"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker is called {worker_id[:100]!r}; {names}")

    async def ListQuarantine(self, request: pb.ListQuarantineRequest, context: Context) -> pb.ListQuarantineResponse:
        now = self._shell.now()
        entries = self._shell.core.quarantine.entries(now)
        return pb.ListQuarantineResponse(payloads=[write_quarantined(entry, now) for entry in entries])

    async def ClearQuarantine(self, request: pb.ClearQuarantineRequest, context: Context) -> pb.ClearQuarantineResponse:
        known = [entry.payload for entry in self._shell.core.quarantine.entries(self._shell.now())]
        if request.all:
            self._shell.handle(QuarantineCleared(None))
            return pb.ClearQuarantineResponse(cleared=len(known))
        if not request.payload:
            await _refuse(context, "neither a payload is named nor all")
        found = [payload for payload in known if payload.startswith(request.payload)]
        if len(found) != 1:
            what = "no payload" if not found else f"{len(found)} payloads"
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{what} in quarantine begin with {request.payload[:100]!r}; see ListQuarantine",
            )
        _log.info("payload %s is taken out of quarantine", found[0])
        self._shell.handle(QuarantineCleared(found[0]))
        return pb.ClearQuarantineResponse(cleared=1)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        prefix = Prefix(request.name, list(request.token_ids))
        if refusal := _malformed(prefix) or self._shell.core.pin_refusal(prefix):
            await _refuse(context, refusal)
        self._shell.handle(PrefixPinned(prefix))
        return pb.PinPrefixResponse()

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:
        if self._shell.core.prefixes.get(request.name) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no prefix named {request.name!r} is pinned")
        self._shell.handle(PrefixUnpinned(request.name))
        return pb.UnpinPrefixResponse()

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Context) -> pb.ListPrefixesResponse:
        core = self._shell.core
        return pb.ListPrefixesResponse(prefixes=[write_prefix(prefix, core) for prefix in core.prefixes.all])

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        salt = request.salt if request.HasField("salt") else None
        if salt is not None and not 1 <= len(salt) <= _MAX_NAME_LENGTH:
            rule = f"use 1 to {_MAX_NAME_LENGTH}, or leave it out to reset all"
            await _refuse(context, f"the salt is {len(salt)} characters long; {rule}")
        found = self._shell.core.state.count_cached(salt)
        _log.info("the prefix cache is reset%s: %d blocks", " behind a salt" if salt else "", found.num_blocks)
        self._shell.handle(CacheReset(salt))
        return pb.ResetPrefixCacheResponse(
            dropped_blocks=found.num_blocks, blocks_in_use=found.num_in_use, pinned_prefixes=found.num_prefixes
        )


async def _refuse(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    raise AssertionError("abort returned")


async def _refuse_late(context: Context, why: str) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


async def _object(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
    raise AssertionError("abort returned")


def _readmission_objection(core: Scheduler, worker_id: str) -> str | None:
    """Returns why a worker cannot be readmitted; None if it can."""
    replica = core.replica_of_worker(worker_id)
    if replica is not None and replica.availability.wants_to_leave:
        return f"the process of worker {worker_id} was asked to end, and will; start it anew instead"
    if replica is not None and replica.availability.state is ReplicaState.READY:
        return f"worker {worker_id} gets requests already: it is neither cordoned nor drained"
    return None


def _statuses(core: Scheduler, groups: Iterable[RequestGroup], now: float) -> list[pb.RequestStatus]:
    homes = homes_of_groups(core.state)
    return [write_status(group, homes.get(group), _target(core, group), now) for group in groups]


def _target(core: Scheduler, group: RequestGroup) -> Replica | None:
    """Returns the replica to which a group moves; None if it does not."""
    move = core.state.moves.of(group)
    return move.target if move is not None else None


def _select(core: Scheduler, request: pb.ListRequestsRequest) -> list[RequestGroup]:
    """Returns the groups that `request` asks for and that come after the last page, in order of arrival. Raises
    `ValueError` for a state or page token that does not exist."""
    state, after = read_state(request.state), _read_page_token(request.page_token)
    groups = [
        group
        for group in core.groups
        if _serial(group) > after
        and state in (None, group.status)
        and (not request.HasField("tenant") or group.request.tenant == request.tenant)
    ]
    return sorted(groups, key=_serial)


def _serial(group: RequestGroup) -> int:
    """Returns the group's serial number of submission."""
    return group.order[1]


def _read_page_token(token: str) -> int:
    if token and not token.isdecimal():
        raise ValueError(f"page_token {token[:100]!r} is not what a page before has given")
    return int(token or "0")


def _malformed(prefix: Prefix) -> str | None:
    """Returns what is wrong with a prefix whatever replica would compute it; None if nothing is."""
    if not 1 <= len(prefix.name) <= _MAX_NAME_LENGTH:
        return f"the name is {len(prefix.name)} characters long; use 1 to {_MAX_NAME_LENGTH}"
    if not 1 <= len(prefix.token_ids) <= MAX_TOKENS:
        return f"the prefix has {len(prefix.token_ids)} tokens; it may have 1 to {MAX_TOKENS}"
    if max(prefix.token_ids) > _MAX_TOKEN_ID:
        return f"token id {max(prefix.token_ids)} is above {_MAX_TOKEN_ID}"
    return None


async def start_admin_server(
    shell: Operated, feed: StepFeed, address: str, servicer: HealthServicer | None = None
) -> grpc.aio.Server:
    """Serves health and Admin on `address` (host:port or unix:path). Raises `RuntimeError` if it cannot be bound."""
    server = grpc.aio.server(interceptors=[ReadingInterceptor(_refuse, _refuse_late)], options=READING_OPTIONS)
    services.add_AdminServiceServicer_to_server(AdminService(shell, feed), server)
    servicer = servicer or HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for service in ("", SERVICE):
        await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(address)
    await server.start()
    return server
