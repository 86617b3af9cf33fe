# Written by `make client` from async_client.py; change that file.
"""Holds the client for code without asyncio. Any number of threads may use one client at once."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc

from octavo.client.channels import DEFAULT_ADDRESS, Tls, open_channel
from octavo.client.errors import OctavoError, to_error
from octavo.client.events import Event
from octavo.client.params import EmbedOptions, RequestOptions, SamplingParams
from octavo.client.prompts import Chat, EmbedInput, Message, Prompt, TextPair, Tool
from octavo.client.requests import (
    Defaults,
    StreamedRequest,
    cut_short,
    make_collector,
    make_embed_request,
    make_request,
    make_tokenize_request,
    read_embeddings,
    read_models,
)
from octavo.client.results import Embedding, Model, Result
from octavo.client.retries import Attempt, RetryPolicy
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_ABORT_S: Final = 2.0


class Stream(Iterator[Event]):
    """Iterates over the events of a running request.

    A lost connection is made again, and the stream goes on where it was: no event is lost and none comes twice. Closing
    the stream, or leaving its `with` block, aborts the request.
    """

    def __init__(self, stub: Any, request: StreamedRequest, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub = stub
        self._request = request
        self._metadata = metadata
        self._attempt = Attempt()
        self._ended = False
        self._open()

    @property
    def request_id(self) -> str:
        """Returns the id of the request, on the server too."""
        return self._request.request_id

    def __next__(self) -> Event:
        """Returns the next event. Raises `OctavoError`."""
        while not self._ended:
            try:
                event = self._request.accept(next(self._messages))
            except StopIteration:
                self._again(cut_short())
            except grpc.RpcError as failure:
                self._again(to_error(failure))
            else:
                if event is not None:
                    return event
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request, unless its answer is complete."""
        if self._ended:
            return
        self._ended = True
        self._call.cancel()
        if not self._request.complete:
            # With a grace time the server would go on with the request.
            with contextlib.suppress(grpc.RpcError):
                self._stub.Abort(self._request.abort_request(), timeout=_ABORT_S, metadata=self._metadata)

    def _open(self) -> None:
        timeout = self._request.recovery.remaining_s()
        if self._attempt.attach:
            self._call = self._stub.Attach(self._request.attach_request(), timeout=timeout, metadata=self._metadata)
        else:
            self._call = self._stub.Generate(self._request.generate_request(), timeout=timeout, metadata=self._metadata)
        self._messages = iter(self._call)

    def _again(self, error: OctavoError) -> None:
        # The stream was closed meanwhile, by another thread.
        if self._ended:
            return
        self._ended = True
        if self._request.complete:
            return
        self._attempt = self._request.recovery.after(error, self._attempt)
        self._ended = False
        time.sleep(self._attempt.pause_s)
        if self._ended:
            return
        try:
            self._open()
        except ValueError:
            # The whole client was closed.
            self._ended = True
            raise error from None


class Client:
    """Calls a frontend at `address` (host:port or unix:path), over a connection that is made when it is first needed.

    `api_key`, `tls` and `model` go with every call. `timeout` is that of calls that have none, in seconds; None is no
    limit. `detach_grace` is how many seconds the server keeps a stream whose connection was lost. All calls raise
    `OctavoError`.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        model: str = "",
        timeout: float | None = None,
        detach_grace: float = 30.0,
        retries: RetryPolicy | None = None,
    ) -> None:
        """Raises `OSError` for a certificate's file that cannot be read."""
        self._defaults = Defaults(api_key, model, timeout, detach_grace, retries or RetryPolicy())
        # The type stubs of grpc want an argument of `close` that grpc does not.
        self._channel: Any = open_channel(address, tls)
        self._stub: Any = services.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it all calls."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Result:
        """Returns the whole answer. An answer that was lost on its way is asked for again."""
        collector = make_collector(prompt, params)
        with self._open(prompt, params, options, streams=False) as stream:
            for event in stream:
                collector.add(event)
        return collector.result()

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        tools: Sequence[Tool] = (),
    ) -> Result:
        """Returns the assistant's answer to a conversation; `generate` and `stream` take a `Chat`, with more fields."""
        return self.generate(Chat(messages, tools), params, options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Stream:
        """Starts a request and returns its events as they come. To stop early, close the stream."""
        return self._open(prompt, params, options, streams=True)

    def tokenize(self, prompt: str | Chat, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt's token ids. With `add_special_tokens` a text gets a BOS and the like."""
        request = make_tokenize_request(self._defaults.model, prompt, add_special_tokens)
        response = self._unary(self._stub.Tokenize, request)
        return list(response.ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        request = pb.DetokenizeRequest(
            model=self._defaults.model, ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response = self._unary(self._stub.Detokenize, request)
        return str(response.text)

    def embed(
        self, inputs: str | TextPair | Sequence[EmbedInput], options: EmbedOptions | None = None
    ) -> list[Embedding]:
        """Returns what a model that generates no text gives of each input: a text, token ids, or a pair of texts."""
        options = options or EmbedOptions()
        request = make_embed_request(self._defaults, inputs, options)
        return read_embeddings(self._unary(self._stub.Embed, request, options.timeout))

    def models(self) -> list[Model]:
        """Returns the models that are served."""
        return read_models(self._unary(self._stub.ListModels, pb.ListModelsRequest()))

    def abort(self, *request_ids: str) -> list[str]:
        """Ends requests by their ids; returns the ids of those that were running."""
        response = self._unary(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))
        return list(response.aborted)

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, *, streams: bool
    ) -> Stream:
        request = make_request(self._defaults, prompt, params, options, streams=streams)
        return Stream(self._stub, request, self._defaults.metadata)

    def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        recovery, attempt = self._defaults.recovery(timeout), Attempt()
        while True:
            try:
                return method(request, timeout=recovery.remaining_s(), metadata=self._defaults.metadata)
            except grpc.RpcError as failure:
                attempt = recovery.after(to_error(failure), attempt)
            time.sleep(attempt.pause_s)
