"""Calls Octavo from Python: `Client` and `AsyncClient` over gRPC. Needs grpcio and protobuf, nothing else.

with Client("127.0.0.1:50051") as client:
    print(client.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
    for event in client.stream("Once upon a time"):
        if isinstance(event, Delta):
            print(event.text, end="")
"""

from octavo.client.async_client import AsyncClient, AsyncStream
from octavo.client.channels import DEFAULT_ADDRESS, Tls
from octavo.client.errors import (
    AbortedError,
    AuthenticationError,
    DeadlineError,
    NotFoundError,
    OctavoError,
    OverloadedError,
    RequestError,
    ServerError,
    UnavailableError,
)
from octavo.client.events import (
    Candidate,
    Delta,
    Event,
    Finished,
    Notice,
    Started,
    TokenLogprobs,
    Usage,
)
from octavo.client.params import BeamSearch, EmbedOptions, RequestOptions, SamplingParams
from octavo.client.prompts import Chat, EmbedInput, Message, Prompt, TextPair, Tool, ToolCall
from octavo.client.results import Completion, Embedding, Model, Result
from octavo.client.retries import RetryPolicy
from octavo.client.sync_client import Client, Stream

__all__ = [
    "DEFAULT_ADDRESS",
    "AbortedError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "BeamSearch",
    "Candidate",
    "Chat",
    "Client",
    "Completion",
    "DeadlineError",
    "Delta",
    "EmbedInput",
    "EmbedOptions",
    "Embedding",
    "Event",
    "Finished",
    "Message",
    "Model",
    "NotFoundError",
    "Notice",
    "OctavoError",
    "OverloadedError",
    "Prompt",
    "RequestError",
    "RequestOptions",
    "Result",
    "RetryPolicy",
    "SamplingParams",
    "ServerError",
    "Started",
    "Stream",
    "TextPair",
    "Tls",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "UnavailableError",
    "Usage",
]
