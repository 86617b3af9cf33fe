"""The gRPC door: octavo.v1.GenerationService."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from octavo.frontend.errors import Broken, Reason, ServiceError
from octavo.frontend.generation import Generation
from octavo.frontend.grpc_errors import abort_with
from octavo.frontend.grpc_limits import check_abort, check_chat, check_detokenize, check_generate
from octavo.frontend.grpc_messages import read_chat, read_request, write_event
from octavo.frontend.request import GenerationRequest
from octavo.frontend.unknown_fields import refuse_unknown_fields
from octavo.frontend.validation import check_form
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_log = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(services.GenerationServiceServicer):
    """Turns messages into calls of `Generation` and back; holds nothing."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes the events itself instead of yielding them: a generator would not be closed when a write fails."""
        async with _answering(context):
            check_generate(request, self._generation.max_model_len)
            refuse_unknown_fields(request)
            events = self._generation.generate(read_request(request), deadline=_deadline(context))
            async with contextlib.aclosing(events):
                async for emitted in events:
                    await context.write(write_event(emitted, request.response))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with _answering(context):
            check_abort(request)
            refuse_unknown_fields(request)
            return pb.AbortResponse(aborted=[i for i in request.request_ids if self._generation.abort(i)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with _answering(context):
            check_chat(request.chat)
            refuse_unknown_fields(request)
            self._generation.check_model(request.model)
            prompt = read_chat(request.chat) if request.WhichOneof("input") == "chat" else request.text
            check_form(GenerationRequest(prompt=prompt))
            ids = await self._generation.encode(prompt)
            return pb.TokenizeResponse(ids=ids, max_model_len=self._generation.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with _answering(context):
            check_detokenize(request, self._generation.max_model_len)
            refuse_unknown_fields(request)
            self._generation.check_model(request.model)
            text = await self._generation.decode(request.ids, skip_special_tokens=request.skip_special_tokens)
            return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with _answering(context):
            refuse_unknown_fields(request)
            generation = self._generation
            length = generation.served_model_len
            return pb.ListModelsResponse(
                models=[pb.Model(id=generation.model_name, max_model_len=length, ready=generation.ready)]
            )


@contextlib.asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Answers with the error that ends the block."""
    try:
        yield
    except ServiceError as error:
        await abort_with(context, error)
    except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AbortError):
        raise
    except Exception as error:
        if context.cancelled() or context.done():
            # The client left while a message was being written; grpc.aio has no public name for that error.
            raise asyncio.CancelledError from error
        _log.exception("a request failed")
        await abort_with(context, Broken(Reason.INTERNAL, "the server failed on this request; its log says why"))


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining
