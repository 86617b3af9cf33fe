"""Calls any server of OpenAI's API: /v1/completions or /v1/chat/completions, streamed."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Final

import httpx
import msgspec

from octavo.loadgen.failures import Failure, TargetError, one_line
from octavo.loadgen.records import Answer
from octavo.loadgen.requests import Asking
from octavo.loadgen.sse import ChunkReader, Lines, decode_chunk, error_of
from octavo.loadgen.targets import Secrets, Target
from octavo.loadgen.transports import Call, Lot
from octavo.workload.job import Job

_encode = msgspec.json.Encoder().encode
# Servers close connections that were idle for five seconds or more, which a request must not run into.
_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
# How long a request may take in all is for the run to say.
_TIMEOUT: Final = httpx.Timeout(None, connect=30.0)


class HttpTransport:
    """Belongs to one event loop."""

    def __init__(self, target: Target, asking: Asking, secrets: Secrets) -> None:
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

    def prepare(self, job: Job, index: int) -> Call:
        headers = {"x-tenant-id": job.tenant} if job.tenant and self._asking.extensions else {}
        return partial(self._ask, _encode(self._asking.body(job, index)), headers, job.n)

    async def _ask(self, body: bytes, headers: dict[str, str], sequences: int, answer: Answer) -> None:
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
