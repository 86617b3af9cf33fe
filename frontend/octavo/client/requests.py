"""Prepares requests for both clients, and follows their streams through losses of the connection."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from octavo.client.channels import metadata_of
from octavo.client.errors import OctavoError, make_error
from octavo.client.events import Event, Usage, read_event
from octavo.client.params import EmbedOptions, RequestOptions, SamplingParams, embed_request, generate_request
from octavo.client.prompts import Chat, EmbedInput, Prompt, TextPair, chat_message
from octavo.client.results import Collector, Embedding, Model
from octavo.client.retries import Recovery, RetryPolicy
from octavo.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Defaults:
    """Holds the settings of all calls of a client. Times are in seconds."""

    api_key: str | None
    model: str
    timeout: float | None
    detach_grace: float
    retries: RetryPolicy

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that every call carries."""
        return metadata_of(self.api_key)

    def recovery(self, timeout: float | None = None) -> Recovery:
        """Makes the state of a call that can be made again as it is."""
        return Recovery(self.retries, time.monotonic, _deadline(self.timeout if timeout is None else timeout))


@dataclass
class StreamedRequest:
    """Holds a request, and how far its stream was read."""

    request: pb.GenerateRequest
    recovery: Recovery
    # The id was chosen by this client.
    own_id: bool
    complete: bool = field(default=False, init=False)
    _sent: bool = field(default=False, init=False)

    @property
    def request_id(self) -> str:
        """Returns the id of the request, on the server too."""
        return str(self.request.request_id)

    def generate_request(self) -> pb.GenerateRequest:
        """Returns the message that starts the request.

        A request that is started anew gets another id, for the server may keep a failed one for a while.
        """
        if self._sent and self.own_id:
            self.request.request_id = _new_id()
        self._sent = True
        return self.request

    def abort_request(self) -> pb.AbortRequest:
        """Returns the message that ends the request, wherever it stands."""
        return pb.AbortRequest(request_ids=[self.request_id])

    def attach_request(self) -> pb.AttachRequest:
        """Returns the message that goes on where the stream was lost."""
        return pb.AttachRequest(
            request_id=self.request_id,
            after_event_offset=self.recovery.last_offset,
            response=self.request.response,
        )

    def accept(self, message: pb.GenerateResponse | pb.AttachResponse) -> Event | None:
        """Reads the event of a message; returns None for an event that was received before."""
        if isinstance(message, pb.AttachResponse):
            message = message.event
        if not self.recovery.accept(message.event_offset):
            return None
        event = read_event(message)
        self.complete = self.complete or isinstance(event, Usage)
        return event


def make_request(
    defaults: Defaults, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, *, streams: bool
) -> StreamedRequest:
    """Makes a request with the client's defaults filled in. Raises `ValueError` for values that no message can hold."""
    options = options or RequestOptions()
    grace = defaults.detach_grace if options.detach_grace is None else options.detach_grace
    filled = replace(
        options,
        # The id is chosen here, for only a request with a known id can be attached to.
        request_id=options.request_id or _new_id(),
        model=options.model or defaults.model,
        detach_grace=grace,
    )
    recovery = defaults.recovery(options.timeout)
    recovery.attachable = grace > 0
    recovery.restartable = not streams
    request = generate_request(prompt, params or SamplingParams(), filled, incremental=streams)
    return StreamedRequest(request, recovery, own_id=not options.request_id)


def make_collector(prompt: Prompt, params: SamplingParams | None) -> Collector:
    """Makes the collector that puts the answer together."""
    params = params or SamplingParams()
    return Collector(prompt, params.logprobs is not None, params.prompt_logprobs is not None)


def cut_short() -> OctavoError:
    """Returns the error for a stream that ended without an error but too early."""
    return make_error(grpc.StatusCode.UNAVAILABLE, "the stream ended before its last event")


def _new_id() -> str:
    return uuid.uuid4().hex


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def make_tokenize_request(model: str, prompt: str | Chat, add_special_tokens: bool) -> pb.TokenizeRequest:
    """Makes the message of a call of Tokenize. Raises `ValueError` for a chat with an unusable message."""
    if isinstance(prompt, Chat):
        return pb.TokenizeRequest(model=model, chat=chat_message(prompt))
    return pb.TokenizeRequest(model=model, text=prompt, add_special_tokens=add_special_tokens)


def make_embed_request(
    defaults: Defaults, inputs: str | TextPair | Sequence[EmbedInput], options: EmbedOptions
) -> pb.EmbedRequest:
    """Makes the message of a call of Embed, for one text or several. Raises `ValueError` for what no message can
    hold."""
    if isinstance(inputs, str | TextPair):
        inputs = [inputs]
    return embed_request(inputs, replace(options, model=options.model or defaults.model))


def read_embeddings(response: pb.EmbedResponse) -> list[Embedding]:
    """Returns the outputs, in the order of the inputs."""
    return [Embedding(list(each.values), each.prompt_tokens) for each in response.embeddings]


def read_models(response: pb.ListModelsResponse) -> list[Model]:
    """Returns the models that are served."""
    return [Model(m.id, m.max_model_len, m.ready, m.block_size, m.kv_blocks) for m in response.models]
