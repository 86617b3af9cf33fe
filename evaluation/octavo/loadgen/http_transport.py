"""Calls any server of OpenAI's API: /v1/completions or /v1/chat/completions, streamed."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import httpx
import msgspec

from octavo.loadgen.servers import (
    NOTHING_SAID,
    AnswerRecorder,
    Asking,
    Call,
    Failure,
    Lot,
    Said,
    Secrets,
    ServerAddress,
    TargetError,
    one_line,
)
from octavo.workload.job import Job

# -- server-sent events -----------------------------------------------------------------------------------------------


_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class Text(msgspec.Struct, gc=False):
    """Holds what a chunk of a chat adds, or a whole message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class Choice(msgspec.Struct, gc=False):
    """Holds one sequence's part of a chunk."""

    index: int = 0
    text: str | None = None
    delta: Text | None = None
    message: Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Returns the exact number of tokens where the server shows their ids; else 1 where there is text, and 0 where
        there is none."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return 1 if self.text or self.delta or self.message else 0

    @property
    def said(self) -> str:
        """Returns the text of the answer itself, without what was thought before it."""
        told = self.delta or self.message
        return self.text or (told and told.content) or ""


class Details(msgspec.Struct, gc=False):
    """Holds the counts of a prompt's tokens."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """Holds numbers of tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int:
        """Returns the number of cached tokens, 0 also where the server does not say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Chunk(msgspec.Struct, gc=False):
    """Holds an event, or a whole answer that is no stream."""

    choices: list[Choice] = []
    usage: Counts | None = None
    error: Any = None
    # Of an error that is not wrapped.
    object: str | None = None
    message: str | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


def decode_chunk(payload: bytes) -> Chunk:
    """Raises `Failure` for what is no chunk, or tells of an error."""
    try:
        chunk = _decode_chunk(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failure("unreadable answer", f"{error}: {payload[:100]!r}") from error
    if chunk.error is not None or chunk.object == "error":
        raise Failure(*error_of(payload, "error in the stream"))
    return chunk


def error_of(body: bytes, kind: str) -> tuple[str, str]:
    """Returns kind and detail of an error's body in any of the forms that servers give it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return kind, body[:300].decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return kind, str(error)
    code = error.get("code")
    # A number repeats the status.
    named = f"{kind} {code}" if isinstance(code, str) and not code.isdigit() else kind
    return named, str(error.get("message") or error.get("detail") or error)


class Lines:
    """Takes bytes and yields the payloads of events."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        # Whether the server said that the stream is complete.
        self.done = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Returns the payloads that are complete now. Comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                payload = line[len(_DATA) :].strip()
                if payload == _DONE:
                    self.done = True
                else:
                    yield payload


class ChunkReader:
    """Tells an `AnswerRecorder` what is in its chunks."""

    __slots__ = ("_answer", "_open", "_usage")

    def __init__(self, answer: AnswerRecorder, sequences: int) -> None:
        self._answer = answer
        self._open = sequences
        self._usage: Counts | None = None

    @property
    def complete(self) -> bool:
        """Returns whether every sequence has said why it ended."""
        return self._open <= 0

    def read(self, chunk: Chunk) -> None:
        for choice in chunk.choices:
            if count := choice.num_tokens:
                self._answer.tokens(choice.index, count)
                self._answer.says(choice.said, choice.token_ids or ())
            self._open -= choice.finish_reason is not None
        if chunk.usage is not None:
            self._usage = chunk.usage

    def end(self) -> None:
        """Ends the stream; called once, at the end: what the server counted is what counts."""
        usage = self._usage
        if usage is not None and usage.completion_tokens:
            self._answer.usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._answer.end()


# -- requests ---------------------------------------------------------------------------------------------------------


_encode = msgspec.json.Encoder().encode
# Servers close connections that were idle for five seconds or more, which a request must not run into.
_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
# How long a request may take in all is for the run to say.
_TIMEOUT: Final = httpx.Timeout(None, connect=30.0)


class HttpTransport:
    """Belongs to one event loop."""

    def __init__(self, target: ServerAddress, asking: Asking, secrets: Secrets) -> None:
        self._target = target
        self._asking = asking
        self._secrets = secrets
        self._url = f"{target.address}/v1/{'chat/completions' if asking.chat else 'completions'}"
        authority = None if secrets.ca_certificate is None else str(secrets.ca_certificate)
        self._context = ssl.create_default_context(cafile=authority) if target.tls else None
        # A pool of connections would look at all of them for every request.
        self._lot = Lot(self._client, size=1)

    def _client(self) -> httpx.AsyncClient:
        headers = {"accept": "text/event-stream", "accept-encoding": "identity", "content-type": "application/json"}
        if self._secrets.api_key:
            headers["authorization"] = f"Bearer {self._secrets.api_key}"
        transport = httpx.AsyncHTTPTransport(
            verify=self._context or False, limits=_LIMITS, uds=self._target.socket, trust_env=False
        )
        return httpx.AsyncClient(transport=transport, headers=headers, timeout=_TIMEOUT, trust_env=False)

    async def open(self) -> str:
        """Raises `TargetError`."""
        response = await self._list_models()
        # A server may have more than it lists, so a name that was given is for its answers to refuse.
        model = self._asking.model or self._first(response)
        self._asking = replace(self._asking, model=model)
        return model

    async def _list_models(self) -> httpx.Response:
        async with self._borrowed() as client:
            try:
                response = await client.get(f"{self._target.address}/v1/models", timeout=30.0)
            except httpx.HTTPError as error:
                raise TargetError(f"cannot reach {self._target}: {_describe(error)}; is it running?") from error
        if response.status_code in (401, 403):
            raise TargetError(f"{self._target} {self._secrets.advice} ({_said(response)})")
        return response

    def _first(self, response: httpx.Response) -> str:
        what = f"{self._target} does not list its models; is this a server of OpenAI's API? Else name one by --model"
        if response.status_code != 200:
            raise TargetError(f"{what} ({_said(response)})")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{what} ({one_line(response.text)!r})") from error

    def prepare(self, job: Job, index: int, said: Said = NOTHING_SAID) -> Call:
        headers = {"x-tenant-id": job.tenant} if job.tenant and self._asking.extensions else {}
        return partial(self._ask, _encode(self._asking.body(job, index, said)), headers, job.n)

    async def _ask(self, body: bytes, headers: dict[str, str], sequences: int, answer: AnswerRecorder) -> None:
        async with self._borrowed() as client:
            try:
                async with client.stream("POST", self._url, content=body, headers=headers) as response:
                    await _read(response, ChunkReader(answer, sequences))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise Failure("cannot connect", _describe(error)) from error
            except httpx.HTTPError as error:
                raise Failure("connection lost", _describe(error)) from error

    @contextlib.asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[httpx.AsyncClient]:
        number = self._lot.take()
        try:
            yield self._lot.members[number]
        finally:
            self._lot.give_back(number)

    async def aclose(self) -> None:
        for client in self._lot.members:
            await client.aclose()


async def _read(response: httpx.Response, reader: ChunkReader) -> None:
    """Raises `Failure` for an error of the server's, and for an answer that is not complete."""
    if response.status_code != 200:
        raise Failure(*error_of(await response.aread(), f"HTTP {response.status_code}"))
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        # What cannot be streamed, such as a beam search, may come whole all the same.
        reader.read(decode_chunk(await response.aread()))
    else:
        lines = Lines()
        async for data in response.aiter_raw():
            for payload in lines.feed(data):
                reader.read(decode_chunk(payload))
        if not (lines.done or reader.complete):
            raise Failure("connection lost", "the stream ended before its last event")
    reader.end()


def _describe(error: httpx.HTTPError) -> str:
    return one_line(str(error)) or type(error).__name__


def _said(response: httpx.Response) -> str:
    _, detail = error_of(response.content, "")
    return one_line(f"HTTP {response.status_code}: {detail}")
