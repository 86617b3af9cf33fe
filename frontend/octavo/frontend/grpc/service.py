"""Serves octavo.v1.GenerationService, the gRPC API."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, Final

import grpc

from octavo.frontend.access.access import tenant_from_headers
from octavo.frontend.errors import ServiceError, bad_parameter, internal_error, log_failure
from octavo.frontend.grpc.access import caller_of
from octavo.frontend.grpc.errors import abort_with
from octavo.frontend.grpc.messages import shown_fields, written
from octavo.frontend.grpc.requests import (
    check_abort,
    check_chat,
    check_detokenize,
    check_generate,
    check_options,
    read_chat,
    read_embed,
    read_request,
    refuse_unknown_fields,
)
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.events import Emitted
from octavo.frontend.request.pooling import numbers_of, shortened
from octavo.frontend.request.request import Caller
from octavo.frontend.stream.generation import Generation
from octavo.frontend.stream.pacing import paced
from octavo.frontend.stream.pooling import outputs
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_log = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]
# grpc.aio has no public name for the error of a failed write, which may come before the context knows of the failure.
_WRITE_FAILED: Final = "ExecuteBatchError"


class GenerationService(services.GenerationServiceServicer):
    """Turns messages into calls of `Generation` and back; holds nothing."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes the events itself instead of yielding them: a generator would not be closed when a write fails."""
        async with answering(context):
            check_generate(request, self._generation.max_model_len)
            refuse_unknown_fields(request)
            caller, metadata = caller_of(context), metadata_of(context)
            asked = read_request(request, metadata)
            tenant = asked.tenant or tenant_from_headers(metadata, caller)
            asked = replace(asked, tenant=tenant, request_id=asked.request_id or secrets.token_hex(16))
            events = self._generation.generate(asked, caller, deadline_of(context))
            await self._answer(events, asked.request_id, request.response, context)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        async with answering(context):
            refuse_unknown_fields(request)
            caller, after = caller_of(context), request.after_event_offset
            check_options(request.response, self._generation.request_of(request.request_id, caller))
            events = self._generation.attach(request.request_id, after, caller, deadline_of(context))
            await self._answer(events, request.request_id, request.response, context, attaches=True)

    async def _answer(
        self,
        events: AsyncGenerator[Emitted],
        request_id: str,
        options: pb.ResponseOptions,
        context: Context,
        *,
        attaches: bool = False,
    ) -> None:
        shown, piece, has_begun = shown_fields(options), self._generation.tokenizer.piece, False
        async with paced(self._generation.stall_timeout_s) as pace, contextlib.aclosing(events):
            async for emitted in events:
                if not has_begun:
                    has_begun = True
                    await context.send_initial_metadata(self._initial_metadata(request_id, caller_of(context)))
                with pace:
                    message = await written(emitted, shown, piece)
                    await self._generation.others_first()
                    await context.write(pb.AttachResponse(event=message) if attaches else message)

    def _initial_metadata(self, request_id: str, caller: Caller) -> tuple[tuple[str, str], ...]:
        prompt_tokens = self._generation.prompt_tokens_of(request_id, caller)
        # Metadata holds ASCII only; `started` has the id in any case.
        named = (("x-request-id", request_id),) if request_id.isascii() else ()
        return (*named, ("x-prompt-tokens", str(prompt_tokens)))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with answering(context):
            check_abort(request)
            refuse_unknown_fields(request)
            caller = caller_of(context)
            return pb.AbortResponse(aborted=[i for i in request.request_ids if self._generation.abort(i, caller)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context):
            check_chat(request.chat)
            refuse_unknown_fields(request)
            self._generation.check_model(request.model)
            prompt = _tokenized(request)
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._generation.encode(prompt, caller_of(context), add_special_tokens=add)
            return pb.TokenizeResponse(ids=ids, max_model_len=self._generation.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with answering(context):
            check_detokenize(request, self._generation.max_model_len)
            refuse_unknown_fields(request)
            self._generation.check_model(request.model)
            skip, caller = request.skip_special_tokens, caller_of(context)
            text = await self._generation.decode(request.ids, caller, skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=text)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with answering(context):
            refuse_unknown_fields(request)
            generation, caller = self._generation, caller_of(context)
            generation.check_model(request.model)
            metadata = metadata_of(context)
            tenant = request.tenant or tenant_from_headers(metadata, caller)
            asked = read_embed(request, generation, tenant, metadata)
            deadline = deadline_of(context)
            found = await outputs(lambda one: generation.pool(one, caller, deadline), asked)
            vectors = [numbers_of(output.values) for output in found]
            if request.HasField("dimensions"):
                vectors = [shortened(each, request.dimensions) for each in vectors]
            embeddings = [
                pb.Embedding(values=vector, prompt_tokens=output.prompt_tokens)
                for vector, output in zip(vectors, found, strict=True)
            ]
            return pb.EmbedResponse(model=request.model or generation.model_name, embeddings=embeddings)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with answering(context):
            refuse_unknown_fields(request)
            generation = self._generation
            length, (block_size, kv_blocks) = generation.served_model_len, generation.kv_memory
            return pb.ListModelsResponse(
                models=[
                    pb.Model(
                        id=name,
                        max_model_len=length,
                        ready=generation.ready,
                        block_size=block_size,
                        kv_blocks=kv_blocks,
                    )
                    for name in generation.model_names
                ]
            )


@contextlib.asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """Ends the call with the error that ends the block; errors that are no `ServiceError` become an internal error."""
    try:
        yield
    except ServiceError as error:
        await abort_with(context, error)
    except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AbortError):
        raise
    except Exception as error:
        if context.cancelled() or context.done() or type(error).__name__ == _WRITE_FAILED:
            # The client left while a message was being written.
            raise asyncio.CancelledError from error
        log_failure(_log, "a request failed")
        await abort_with(context, internal_error())


def _tokenized(request: pb.TokenizeRequest) -> str | Chat:
    if request.WhichOneof("input") != "chat":
        return request.text
    if request.HasField("add_special_tokens"):
        rule = "a chat has the special tokens that its template writes; leave it out"
        raise bad_parameter("add_special_tokens", "set together with a chat", rule)
    return read_chat(request.chat)


def metadata_of(context: Context) -> dict[str, str]:
    """Returns the call's text metadata, by names in lower case; binary entries are left out."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def deadline_of(context: Context) -> float | None:
    """Returns the call's deadline as a time of the event loop's clock, None for a call that has none."""
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining
