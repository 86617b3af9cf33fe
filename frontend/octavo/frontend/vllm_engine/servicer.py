"""Serves vllm.grpc.engine.VllmEngine: turns messages into calls of `Generation` and back."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.frontend.access.access import tenant_from_headers
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import DeadlineExceeded, Overloaded, Reason, Unsupported
from octavo.frontend.grpc.access import caller_of
from octavo.frontend.grpc.errors import abort_with
from octavo.frontend.grpc.requests import MAX_ABORTED_IDS, refuse_unknown_fields
from octavo.frontend.grpc.service import answering, deadline_of, metadata_of
from octavo.frontend.request.validation import check_count
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.generation import Generation
from octavo.frontend.stream.pacing import paced
from octavo.frontend.vllm_engine.kv_events import PublishedBatch, batch_message, feeding
from octavo.frontend.vllm_engine.model_files import chunks, read_model_files, tokenizer_archive
from octavo.frontend.vllm_engine.requests import read_generate
from octavo.frontend.vllm_engine.responses import Responses

# Each has two sockets to the scheduler.
_MOST_SUBSCRIBERS = 16

Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngine(services.VllmEngineServicer):  # type: ignore[misc]
    """Answers the calls of a gateway; calls that need another kind of engine get UNIMPLEMENTED."""

    def __init__(self, generation: Generation, scheduler: SchedulerPool, config: FrontendConfig) -> None:
        """Reads the model's files. Raises `ModelDirectoryError`."""
        self._generation = generation
        self._scheduler = scheduler
        self._name = config.served_model_name
        self._stall_timeout_s = config.stall_timeout_s
        self._kv_events = config.scheduler_kv_events, config.scheduler_kv_events_replay
        self._num_subscribers = 0
        self._files = read_model_files(config.model_directory, config.generation_config)
        self._archive = functools.cache(functools.partial(tokenizer_archive, config.model_directory))
        self._began = time.monotonic()

    async def Generate(self, request: Any, context: Context) -> None:
        """Writes the messages itself instead of yielding them: a generator would not be closed when a write fails."""
        async with _answering(context):
            caller, metadata = caller_of(context), metadata_of(context)
            read = replace(
                read_generate(request, self._generation.max_model_len),
                tenant=tenant_from_headers(metadata, caller),
                traceparent=metadata.get("traceparent", ""),
            )
            responses = Responses(request.stream, read.top_logprobs is not None)
            events = self._generation.generate(read, caller, deadline_of(context))
            async with paced(self._stall_timeout_s) as pace, contextlib.aclosing(events):
                async for _, event in events:
                    async for response in responses.written(event):
                        with pace:
                            await self._generation.others_first()
                            await context.write(response)

    async def Abort(self, request: Any, context: Context) -> Any:
        """Aborts the requests that run; ids of others are no error."""
        async with _answering(context):
            check_count("request_ids", request.request_ids, MAX_ABORTED_IDS)
            refuse_unknown_fields(request)
            for request_id in request.request_ids:
                self._generation.abort(request_id, caller_of(context))
            return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        ready = self._generation.ready
        message = "ready" if ready else f"not ready: {self._scheduler.availability.name}"
        return pb.HealthCheckResponse(healthy=ready, message=message)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        files, length = self._files, self._generation.max_model_len
        return pb.GetModelInfoResponse(
            model_path=str(files.directory),
            tokenizer_path=str(files.directory),
            is_generation=True,
            max_context_length=length,
            # A token must be left for the answer.
            max_req_input_len=length - 1,
            vocab_size=files.defaults.vocab_size,
            served_model_name=self._name,
            model_type=str(files.config.get("model_type", "")),
            architectures=files.architectures,
            eos_token_ids=sorted(files.defaults.eos_token_ids),
            bos_token_id=files.bos_token_id,
            pad_token_id=files.pad_token_id,
            default_sampling_params_json=files.default_sampling(),
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        status = self._scheduler.status
        model = status.model if status else None
        return pb.GetServerInfoResponse(
            active_requests=self._generation.num_running,
            uptime_seconds=time.monotonic() - self._began,
            # What gateways of this protocol look for.
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=status.block_size if status and model else 0,
            model_dtype=model.dtype if model else "",
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Counts this frontend's requests as running: the scheduler alone knows which of them wait."""
        running, status = self._generation.num_running, self._scheduler.status
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_total_reqs=running,
            max_total_num_tokens=status.capacity_tokens if status else 0,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version("octavo"), dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        async with _answering(context):
            archive = await asyncio.get_running_loop().run_in_executor(None, self._archive)
            async with paced(self._stall_timeout_s) as pace:
                for data, digest in chunks(archive):
                    with pace:
                        await context.write(common.GetTokenizerChunk(data=data, sha256=digest))

    async def Embed(self, request: Any, context: Context) -> None:
        await _refuse("embeddings", context)

    async def FlushCache(self, request: Any, context: Context) -> None:
        await _refuse("emptying the prefix cache, which all frontends share,", context)

    async def StartProfile(self, request: Any, context: Context) -> None:
        await _refuse("a profiler", context)

    async def StopProfile(self, request: Any, context: Context) -> None:
        await _refuse("a profiler", context)

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        """Writes what is missed first, then what comes, until the gateway hangs up. No load is told beside it: gateways
        ask for that."""
        if not self._kv_events[0]:
            await _refuse("without --scheduler-kv-events, events of the KV cache", context)
        async with _answering(context):
            if self._num_subscribers >= _MOST_SUBSCRIBERS:
                raise Overloaded(Reason.TOO_MANY_REQUESTS, f"{_MOST_SUBSCRIBERS} gateways follow the KV events already")
            self._num_subscribers += 1
            try:
                with feeding(*self._kv_events) as feed:
                    await self._write_batches(feed.missed(request.start_sequence_number), context)
                    # A gateway waits for the headers of its call.
                    with contextlib.suppress(grpc.aio.UsageError):
                        await context.send_initial_metadata(())
                    await self._write_batches(feed.live(), context)
            finally:
                self._num_subscribers -= 1

    async def _write_batches(self, batches: AsyncGenerator[PublishedBatch], context: Context) -> None:
        async with paced(self._stall_timeout_s) as pace, contextlib.aclosing(batches):
            async for batch in batches:
                with pace:
                    await context.write(batch_message(batch))


async def _refuse(what: str, context: Context) -> None:
    await abort_with(context, Unsupported(Reason.UNSUPPORTED_FIELD, f"{what} cannot be had from this server"))


@contextlib.asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Ends the call with the error that ends the block; a request that has waited too long gets RESOURCE_EXHAUSTED.

    Gateways take DEADLINE_EXCEEDED for a fault of the worker, and send the request again and again.
    """
    async with answering(context):
        try:
            yield
        except DeadlineExceeded as error:
            if error.reason is not Reason.QUEUE_TIMEOUT:
                raise
            overloaded = Overloaded(Reason.QUEUE_FULL, str(error))
            overloaded.reason, overloaded.metadata = error.reason, error.metadata
            raise overloaded from error
