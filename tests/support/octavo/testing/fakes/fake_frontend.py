"""A frontend in name only: it plays one script of events to whoever asks, and loses connections on demand."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2_grpc

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services


class FakeFrontend(services.GenerationServiceServicer):
    """Attributes are knobs to be turned between calls and records to be read."""

    def __init__(self) -> None:
        self.script: list[pb.GenerateResponse] = []
        # For the next calls that stream: after how many events they lose their connection; None: never.
        self.losses: deque[int | None] = deque()
        # Statuses that the next calls are refused with.
        self.refusals: deque[tuple[grpc.StatusCode, Status]] = deque()
        self.forgets = False
        self.calls: list[tuple[str, int]] = []
        self.generated: list[pb.GenerateRequest] = []
        self.attached: list[pb.AttachRequest] = []
        self.embedded: list[pb.EmbedRequest] = []
        self.aborted: list[str] = []
        self.metadata: dict[str, str] = {}
        self.remaining_s: float | None = None
        # Cleared, it holds back what comes after the first event.
        self.go_on = threading.Event()
        self.go_on.set()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self._begin("generate", 0, context)
        self.generated.append(request)
        yield from self._play(0, context)

    def Attach(self, request: pb.AttachRequest, context: Any) -> Iterator[pb.AttachResponse]:
        self._begin("attach", request.after_event_offset, context)
        self.attached.append(request)
        if self.forgets:
            refuse(context, grpc.StatusCode.NOT_FOUND, status(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"))
        for event in self._play(request.after_event_offset, context):
            yield pb.AttachResponse(event=event)

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.aborted += request.request_ids
        return pb.AbortResponse(aborted=request.request_ids)

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._begin("tokenize", 0, context)
        return pb.TokenizeResponse(ids=request.text.encode() or [1, 2])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.ids).decode())

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self._begin("embed", 0, context)
        self.embedded.append(request)
        return pb.EmbedResponse(
            model="m",
            embeddings=[pb.Embedding(values=[index, 0.5], prompt_tokens=3) for index in range(len(request.inputs))],
        )

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[pb.Model(id="m", max_model_len=64, ready=True, block_size=16, kv_blocks=10)]
        )

    def _begin(self, name: str, after: int, context: Any) -> None:
        self.calls.append((name, after))
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining()
        if self.refusals:
            refuse(context, *self.refusals.popleft())

    def _play(self, after: int, context: Any) -> Iterator[pb.GenerateResponse]:
        last = self.losses.popleft() if self.losses else None
        left = [event for event in self.script if event.event_offset > after]
        for event in left[:last]:
            yield event
            self.go_on.wait(60)
        if last is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def status(code: grpc.StatusCode, reason: str, retry_after_s: float | None = None, **metadata: str) -> Status:
    """Makes an error as the server packs it."""
    details = [ErrorInfo(reason=reason, domain="octavo", metadata=metadata)]
    if retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
        details.append(retry)
    packed = [AnyMessage() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    return Status(code=code.value[0], message=f"refused with {reason}", details=packed)


def refuse(context: Any, code: grpc.StatusCode, answer: Status) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", answer.SerializeToString()),))
    context.abort(code, answer.message)


@contextmanager
def serving(
    frontend: FakeFrontend,
    credentials: grpc.ServerCredentials | None = None,
    probes: health_pb2_grpc.HealthServicer | None = None,
) -> Iterator[str]:
    """Serves inside the block, encrypted if there are credentials, and yields the address."""
    server = grpc.server(ThreadPoolExecutor(4))
    if probes:
        health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    services.add_GenerationServiceServicer_to_server(frontend, server)
    where = "127.0.0.1:0"
    port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        frontend.go_on.set()
        server.stop(0).wait()


def script(*texts: str, index: int = 0) -> list[pb.GenerateResponse]:
    """A whole answer of one sequence: a delta for each text, whose bytes are its token ids."""
    events: list[dict[str, Any]] = [
        {"notice": pb.Notice(kind=pb.Notice.KIND_QUEUED, queue_position=2)},
        {"started": pb.Started(request_id="r", model="m", prompt_tokens=3, seed=7)},
    ]
    events += [{"delta": pb.TokenDelta(index=index, text=text, token_ids=text.encode())} for text in texts]
    events += [
        {"finished": pb.Finished(index=index, reason=pb.FINISH_REASON_STOP, stop_string="STOP")},
        {"usage": pb.Usage(prompt_tokens=3, completion_tokens=len("".join(texts).encode()))},
    ]
    return [pb.GenerateResponse(event_offset=number, **event) for number, event in enumerate(events, 1)]
