"""Calls Octavo's own gRPC API, by its client for asyncio."""

from dataclasses import replace
from functools import partial
from typing import Final

import grpc

from octavo.client import (
    AsyncClient,
    AuthenticationError,
    BeamSearch,
    Delta,
    Event,
    OctavoError,
    Prompt,
    RequestOptions,
    RetryPolicy,
    SamplingParams,
    Tls,
    Usage,
)
from octavo.client.retries import STREAM_LOST
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
)
from octavo.runtime.transport.no_server import explain_no_server
from octavo.workload.job import Job

# Servers of HTTP/2 take a hundred by connection, or more.
_STREAMS: Final = 64
_SERVICE: Final = "octavo.v1.GenerationService"
_ADVICE: Final = {"plain": "write grpc:// rather than grpcs://", "encrypted": "write grpcs://"}
# A request that fails must count as one.
_NO_RETRIES: Final = RetryPolicy(max_retries=0, reconnect_s=0.0)


class GrpcTransport:
    """Belongs to one event loop."""

    def __init__(self, target: ServerAddress, asking: Asking, secrets: Secrets) -> None:
        self._target = target
        self._asking = asking
        self._secrets = secrets
        self._lot = Lot(self._client, size=_STREAMS)

    def _client(self) -> AsyncClient:
        return AsyncClient(
            self._target.address,
            api_key=self._secrets.api_key,
            tls=Tls(self._secrets.ca_certificate) if self._target.tls else None,
            detach_grace=0.0,
            retries=_NO_RETRIES,
        )

    async def open(self) -> str:
        """Raises `TargetError`."""
        number = self._lot.take()
        try:
            names = [model.id for model in await self._lot.members[number].models()]
        except AuthenticationError as error:
            raise TargetError(f"{self._target} {self._secrets.advice} ({error})") from error
        except OctavoError as error:
            raise TargetError(
                f"cannot ask {self._target}: {_words(error)} [{error.code.name}]. For HTTP, write http://HOST:PORT"
            ) from error
        finally:
            self._lot.give_back(number)
        wanted = self._asking.model
        if wanted and wanted not in names:
            raise TargetError(f"{self._target} has no model {wanted!r}; it has {', '.join(names) or 'none'}")
        self._asking = replace(self._asking, model=wanted or (names[0] if names else ""))
        return self._asking.model

    def prepare(self, job: Job, index: int, said: Said = NOTHING_SAID) -> Call:
        options = RequestOptions(model=self._asking.model, priority=job.priority or None, tenant=job.tenant)
        prompt = self._asking.prompt(job, index, said)
        return partial(self._ask, prompt, _sampling(job, self._asking.temperature), options)

    async def _ask(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, answer: AnswerRecorder
    ) -> None:
        number = self._lot.take()
        try:
            async with self._lot.members[number].stream(prompt, params, options) as stream:
                async for event in stream:
                    _tell(answer, event)
        except OctavoError as error:
            raise Failure(_kind(error), _words(error)) from error
        finally:
            self._lot.give_back(number)
        answer.end()

    async def aclose(self) -> None:
        for client in self._lot.members:
            await client.aclose()


def _sampling(job: Job, temperature: float) -> SamplingParams:
    return SamplingParams(
        n=job.n,
        temperature=None if job.beam_width else temperature,
        beam_search=BeamSearch(job.beam_width) if job.beam_width else None,
        max_tokens=job.output_tokens,
        min_tokens=job.output_tokens,
        ignore_eos=True,
    )


def _tell(answer: AnswerRecorder, event: Event) -> None:
    match event:
        case Delta() if event.token_ids:
            answer.tokens(event.index, len(event.token_ids))
            answer.says(event.text, event.token_ids)
        case Usage():
            answer.usage(event.prompt_tokens, event.completion_tokens, event.cached_prompt_tokens, event.preemptions)


def _words(error: OctavoError) -> str:
    """Returns the reason of a failure: in our words where no server of ours has answered, else in the server's."""
    found = None if error.reason else explain_no_server(error.code.name, str(error), _SERVICE, **_ADVICE)
    return found or str(error)


def _kind(error: OctavoError) -> str:
    if error.reason == STREAM_LOST or (error.code is grpc.StatusCode.UNAVAILABLE and not error.reason):
        # Nobody answered, or nobody any longer.
        return "connection lost"
    return f"{error.code.name} {error.reason}".rstrip()
