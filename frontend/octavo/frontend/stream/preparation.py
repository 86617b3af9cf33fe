"""Waits, as long as is worth it, for what a new request needs behind the frontend."""

import asyncio
import time

from octavo.frontend.errors import DeadlineExceeded, InvalidRequest, Reason, Unavailable
from octavo.frontend.request.request import Caller, GenerationRequest
from octavo.frontend.request.validation import check_prompt_size
from octavo.frontend.scheduler.client import Availability, unreachable
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.completion import Completion, EndRules
from octavo.frontend.stream.resolution import Limits, find_prefix, model_len, resolve_sampling
from octavo.frontend.stream.running import RunningRequest
from octavo.frontend.stream.stream import Shape
from octavo.frontend.text.model_defaults import ModelDefaults
from octavo.frontend.text.pool import TextPool
from octavo.frontend.text.stop_strings import StopStrings
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.wire.requests import CacheKey, ServiceStatus
from octavo.wire.sampling import MAX_GRAMMAR, SamplingParams


class Readiness:
    """What of the service is there."""

    def __init__(self, scheduler: SchedulerPool, model_name: str, worker_grace_s: float) -> None:
        self._scheduler = scheduler
        self._model_name = model_name
        self._worker_grace_s = worker_grace_s

    async def wait(self) -> ServiceStatus:
        """Returns once there are workers of this frontend's model. Raises `Unavailable`."""
        waiting_since = time.monotonic()
        while (availability := self._scheduler.availability) is not Availability.READY:
            self._check_worth_waiting(availability, time.monotonic() - waiting_since)
            await self._scheduler.changed()
        status = self._scheduler.status
        assert status is not None
        return status

    async def prefix(self, name: str, *, tells_names: bool) -> list[int]:
        """The token ids of a pinned prefix; waits until the scheduler has said what is pinned.

        Raises `NotFound`, with the names of all where these may be told, and `Unavailable`.
        """
        prefixes = self._scheduler.prefixes
        while name not in prefixes.known and not prefixes.told:
            await self._scheduler.changed()
            await self.wait()
            prefixes = self._scheduler.prefixes
        return find_prefix(name, prefixes.known, tells_names=tells_names)

    def _check_worth_waiting(self, availability: Availability, waited_s: float) -> None:
        away_s = self._scheduler.away_s()
        if availability is Availability.NO_SCHEDULER and away_s > self._scheduler.grace_s:
            raise unreachable(away_s)
        if availability is Availability.NO_WORKER and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER, f"no worker has registered in {waited_s:.0f} s; start one, or try again later"
            )
        if availability is Availability.STALLED and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER,
                "the workers have answered no step for long, though there is work; the scheduler's log says which and"
                " why; try again later",
            )
        if availability is Availability.MODEL_MISMATCH:
            raise self._mismatch()

    def _mismatch(self) -> Unavailable:
        status = self._scheduler.status
        info = status.model if status else None
        theirs = f"{info.name} ({info.fingerprint[:12]})" if info else "another model"
        return Unavailable(
            Reason.MODEL_MISMATCH,
            f"the workers serve {theirs} and this frontend {self._model_name}"
            f" ({self._scheduler.model_fingerprint[:12]}); start both with the same model directory",
        )


# From a request to the journal that the scheduler gets: all that may wait, and all that may take long.


class Preparation:
    """What the requests of one frontend are made from."""

    def __init__(
        self, model_name: str, tokenizer: ModelTokenizer, defaults: ModelDefaults, text: TextPool, readiness: Readiness
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._text = text
        self._readiness = readiness

    async def journal(self, running: RunningRequest) -> Journal:
        """Raises `ServiceError`."""
        request = running.request
        limits = await self._limits_in_time(request.max_queue_s)
        prefix = await self._prefix(request.pinned_prefix, running.caller) if request.pinned_prefix else []
        check_prompt_size(request.prompt, limits.max_model_len)
        own = await self._text.encode(request.prompt, add_special_tokens=request.add_special_tokens and not prefix)
        prompt_token_ids = prefix + own
        grammar = await self._grammar(request)
        return Journal(
            running.request_id,
            prompt_token_ids,
            resolve_sampling(request, prompt_token_ids, self._defaults, limits, grammar),
            running.arrived_at,
            priority=request.priority,
            tenant=running.tenant,
            cache_key=CacheKey(salt=running.salt, salted_from=len(prefix)),
            max_queue_s=request.max_queue_s,
            traceparent=running.meter.traceparent,
        )

    def shape(self, request: GenerationRequest, sampling: SamplingParams) -> Shape:
        """How the request's tokens become events."""
        return Shape(
            model=request.model or self._model_name,
            num_results=request.num_sequences,
            incremental=request.incremental,
            completion=lambda: self._completion(request, sampling),
        )

    async def _prefix(self, name: str, caller: Caller) -> list[int]:
        # What is pinned tells of whom it is pinned for.
        return await self._readiness.prefix(name, tells_names=caller.trusted)

    async def _limits_in_time(self, max_queue_s: float | None) -> Limits:
        """Waiting for a worker is waiting to be computed."""
        try:
            async with asyncio.timeout(max_queue_s):
                return self._limits(await self._readiness.wait())
        except TimeoutError:
            raise DeadlineExceeded(
                Reason.QUEUE_TIMEOUT,
                f"there was no worker within the {max_queue_s:g} s that the request may wait; try again later",
            ) from None

    def _limits(self, status: ServiceStatus) -> Limits:
        assert status.model is not None
        return Limits(
            status.model.vocab_size,
            model_len(self._defaults, status),
            status.capacity_tokens,
            status.max_parallel,
            status.block_size,
        )

    async def _grammar(self, request: GenerationRequest) -> str:
        grammar = await self._text.compile(request.constraint) if request.constraint else ""
        if len(grammar) > MAX_GRAMMAR:
            raise InvalidRequest(
                Reason.BAD_CONSTRAINT,
                f"the constraint is a grammar of {len(grammar)} characters, and at most {MAX_GRAMMAR} may be; ask for"
                " something simpler",
            )
        return grammar

    def _completion(self, request: GenerationRequest, sampling: SamplingParams) -> Completion:
        rules = EndRules(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            eos_token_ids=self._defaults.eos_token_ids - set(request.stop_token_ids),
            include_stop=request.include_stop,
        )
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        return Completion(rules, detokenizer, StopStrings(request.stop_strings, include_stop=request.include_stop))
