"""Wires the parts of one frontend process, serves gRPC and HTTP, and drains when the process is to stop."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import _async, reflection_pb2, reflection_pb2_grpc
from starlette.types import ASGIApp

from octavo.frontend.access.access import build_access
from octavo.frontend.access.admission import Admission
from octavo.frontend.access.connections import connections_that_fit
from octavo.frontend.access.tls import server_credentials
from octavo.frontend.answer_parsers.reasoning import ReasoningFormat
from octavo.frontend.answer_parsers.reasoning_formats import reasoning_format
from octavo.frontend.app import build_app
from octavo.frontend.batch.service import BatchService
from octavo.frontend.config import FrontendConfig
from octavo.frontend.grpc.access import AdmissionInterceptor, interceptors, reading
from octavo.frontend.grpc.connections import BusyPeers, keep_room
from octavo.frontend.grpc.service import SERVICE_NAME, GenerationService
from octavo.frontend.http.bodies import Bodies, BodyBound
from octavo.frontend.http.guards import AccessMiddleware, AllowedHosts, BrowserGuard, CrossOrigin, parse_origins
from octavo.frontend.http.server import HttpServer
from octavo.frontend.scheduler.pinned_prefixes import read_pinned_prefixes
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stored.metrics import StoredMetrics
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.store_thread import StoreThread
from octavo.frontend.stored.values import Limits
from octavo.frontend.stream.generation import Generation
from octavo.frontend.stream.metrics import CellMetrics, FrontendMetrics
from octavo.frontend.stream.registry import Timeouts
from octavo.frontend.text.model_defaults import read_model_defaults
from octavo.frontend.text.pool import TextPool
from octavo.frontend.text.pooling_defaults import read_pooling_defaults
from octavo.frontend.text.tokenizer import ModelTokenizer, check_vocabulary
from octavo.frontend.vllm_engine.service import add_vllm_engine
from octavo.runtime.models.directory import fingerprint
from octavo.runtime.telemetry.metrics import expose
from octavo.runtime.transport.endpoints import EndpointError
from octavo.runtime.transport.grpc_reading import READING_OPTIONS
from octavo.v1 import generation_pb2_grpc as services

V1ALPHA: Final[str] = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
# The messages of v1 are those of v1alpha under another package name, so the bytes are the same.
V1: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves grpc.reflection.v1 and v1alpha, listing `service_names` and v1alpha (v1 has no descriptor here)."""
    servicer: Any = _async.ReflectionServicer((*service_names, V1ALPHA))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))


_log = logging.getLogger(__name__)

_MOST_PENDING: Final = 100_000
_OPTIONS: Final[list[tuple[str, int]]] = [
    *READING_OPTIONS,
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 32 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 1024),
    # Calls that may wait in gRPC's own queue. By default gRPC cancels some from 1,000 on, without a word; here the
    # scheduler decides which requests are rejected, and by which limit.
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    # A connection that sends nothing, or does not finish its TLS handshake, is closed after this time.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # No compression but the identity: the size to which a small message unpacks has no bound.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Two frontends on one port would share it silently.
    ("grpc.so_reuseport", 0),
    # A frozen or vanished client is found within 15 s, and its requests end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Pings also go out beside another ping, and while requests wait; by default two go out while no data is sent,
    # and then one a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients may ping while nothing is sent for long, as happens while a request is queued.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
]
# Methods whose calls are refused unread where there is no room.
_GENERATING: Final = frozenset({f"/{SERVICE_NAME}/Generate", "/vllm.grpc.engine.VllmEngine/Generate"})
# Connections to the address where health alone is served.
_PROBES: Final = 64
# Seconds that connections get to close once no stream is left.
_STOP_GRACE_S = 1.0


class FrontendServer:
    """Holds the parts of a running frontend. `port` is the bound gRPC port; the system chooses it if `listen` has 0."""

    def __init__(self, config: FrontendConfig, tokenizer: ModelTokenizer | None = None) -> None:
        """Reads the model directory, and its tokenizer where `tokenizer` is None.

        Raises `ModelDirectoryError`; `PinnedPrefixesError`, `ApiKeysError` and `TlsError` for files of these that
        cannot be used; `StorageError` and `StoreError` for the directories of batches and of stored responses;
        `EndpointError` if an address cannot be bound.
        """
        self._config = config
        access, credentials = build_access(config), server_credentials(config)
        defaults = read_model_defaults(config.model_directory, config.generation_config)
        tokenizer = tokenizer or ModelTokenizer(config.model_directory)
        check_vocabulary(tokenizer, config.model_directory, defaults.vocab_size)
        path = config.pinned_prefixes
        prefixes = read_pinned_prefixes(path, tokenizer.encode, defaults.max_model_len) if path else {}
        self._text = TextPool(tokenizer, config.text_processes, config.text_timeout_s)
        self.scheduler = SchedulerPool(
            config.scheduler_endpoints,
            fingerprint(config.model_directory, config.load_format),
            config.scheduler_grace_s,
            prefixes,
            config.curve_keys,
        )
        admission = Admission(config, access.bounds)
        self._metrics = FrontendMetrics(config.served_model_name, admission, lambda: self.scheduler.journals)
        self._stored = _stored_responses(config)
        collectors = [StoredMetrics(self._stored)] if self._stored else []
        expose("frontend", self._metrics, CellMetrics(config.served_model_name, self.scheduler), *collectors)
        self.generation = Generation(
            model_names=(config.served_model_name, *config.model_aliases),
            tokenizer=tokenizer,
            defaults=defaults,
            scheduler=self.scheduler,
            text=self._text,
            access=access,
            admission=admission,
            observer=self._metrics,
            worker_grace_s=config.worker_grace_s,
            timeouts=Timeouts(config.max_request_s, config.max_detach_grace_s, config.stall_timeout_s),
            pooling_defaults=read_pooling_defaults(config.model_directory),
            reasoning_format=_reasoning_format(config, tokenizer),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._busy, self._max_connections = BusyPeers(), connections_that_fit(config.max_connections)
        bounded = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", self._max_connections)]
        room = AdmissionInterceptor(_GENERATING, self.generation.check_room, self.generation.call_came)
        self._server = grpc.aio.server(interceptors=interceptors(access, room, self._busy), options=bounded)
        services.add_GenerationServiceServicer_to_server(GenerationService(self.generation), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        engines = add_vllm_engine(self._server, self.generation, self.scheduler, config)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        add_reflection(self._server, (SERVICE_NAME, health_name, *engines))
        self.port = _bind(self._server, config.listen, credentials)
        probing = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", _PROBES)]
        self._probes = grpc.aio.server(interceptors=[reading()], options=probing)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        if config.health_address:
            _bind(self._probes, config.health_address, None)
        self._batches = BatchService(config) if config.batch_directory else None
        self._app = build_app(self.generation, access, config, self._batches, self._stored)
        bounded_app = BodyBound(self._app, Bodies())
        app: ASGIApp = AccessMiddleware(bounded_app, access, public_metrics=config.public_load_metrics)
        if origins := parse_origins(config.allowed_origins):
            app = CrossOrigin(app, origins)
        guarded = BrowserGuard(app, AllowedHosts(config.http_listen, config.allowed_hosts), origins)
        self._http = HttpServer(guarded, config) if config.http_listen else None
        self.http_port = self._http.port if self._http else 0

    async def serve(self, stopping: asyncio.Event) -> None:
        """Runs until `stopping` is set, then drains. Raises `SchedulerRefused`."""
        await self._set_ready(False)
        await asyncio.gather(self._server.start(), self._probes.start())
        if self._http:
            await self._http.start()
        _log.info("serving %s on %s", self._config.served_model_name, self._config.listen)
        link = asyncio.create_task(self.scheduler.run())
        readiness = asyncio.create_task(self._follow_readiness())
        stop = asyncio.create_task(stopping.wait())
        lag = asyncio.create_task(self._metrics.measure_lag())
        room = asyncio.create_task(self._keep_room())
        stored = asyncio.create_task(self._stored.serve() if self._stored else asyncio.sleep(0))
        batches = asyncio.create_task(self._run_batches())
        try:
            await asyncio.wait((link, readiness, stop), return_when=asyncio.FIRST_COMPLETED)
            readiness.cancel()
            if stop.done():
                await self._drain()
        finally:
            if self._http:
                await self._http.stop()
            await asyncio.gather(self._server.stop(_STOP_GRACE_S), self._probes.stop(_STOP_GRACE_S))
            try:
                await _end(lag, room, readiness, stop, batches, link, stored)
            finally:
                if self._stored:
                    await self._stored.close()
            self._text.close()

    async def _keep_room(self) -> None:
        # On a unix socket no client can keep others out.
        if not self._config.listen.startswith("unix:"):
            await keep_room(self.port, self._busy, self._max_connections, self._http_connections)

    async def _run_batches(self) -> None:
        if self._batches:
            await self._batches.run(self._app)

    def _http_connections(self) -> int:
        return len(self._http.connections) if self._http else 0

    async def _follow_readiness(self) -> None:
        ready = False
        while True:
            await self.scheduler.changed()
            if self.generation.ready != ready:
                ready = not ready
                await self._set_ready(ready)
                _log.info("ready" if ready else f"not ready: {self.scheduler.availability.name}")

    async def _set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(SERVICE_NAME, status)

    async def _drain(self) -> None:
        """Refuses new requests, and waits for running streams, `drain_timeout_s` seconds at most."""
        _log.info("draining %d running requests", self.generation.num_running)
        if self._batches:
            self._batches.runner.drain()
        self.generation.draining = True
        await self._set_ready(False)
        until = time.monotonic() + self._config.drain_timeout_s
        while self.generation.num_running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if self.generation.num_running:
            _log.warning("cutting off %d requests that outlasted the drain time", self.generation.num_running)
            self.generation.cut_off()


def _reasoning_format(config: FrontendConfig, tokenizer: ModelTokenizer) -> ReasoningFormat | None:
    files = tokenizer.files
    templates = files.chat_template + files.tool_template
    return reasoning_format(config.reasoning_parser, templates, lambda text: tokenizer.added_token_id(text) is not None)


def _stored_responses(config: FrontendConfig) -> StoredResponses | None:
    if config.response_store is None or not config.http_listen:
        return None
    limits = Limits(config.response_store_memory, config.tenant_response_store_memory, config.response_expiry_s)
    return StoredResponses(StoreThread(Store(config.response_store, limits)))


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise EndpointError(f"cannot listen on {address}, choose another address: {error}") from error


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels the `tasks` that still run, and raises the first failure among all of them."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
