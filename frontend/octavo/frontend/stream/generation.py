"""Turns requests into their events, on one path for every interface, whatever happens to schedulers and workers."""

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

from octavo.frontend.access.access import Access
from octavo.frontend.access.admission import Admission
from octavo.frontend.answer_parsers.reasoning import ReasoningFormat
from octavo.frontend.errors import (
    Aborted,
    AlreadyExists,
    NotFound,
    Overloaded,
    Reason,
    ServiceError,
    Unavailable,
    bad_parameter,
    internal_error,
    log_failure,
)
from octavo.frontend.request.events import Emitted
from octavo.frontend.request.pooling import PoolingRequest, check_pooling_form
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest, Prompt
from octavo.frontend.request.validation import check_answer_size, check_form, check_prompt_size
from octavo.frontend.scheduler.client import SchedulerAvailability
from octavo.frontend.scheduler.pool import CacheResets, Listing, SchedulerPool
from octavo.frontend.stream.observer import Latencies, Observer
from octavo.frontend.stream.pacing import Turns
from octavo.frontend.stream.preparation import Preparation, Readiness, check_token_ids, model_len
from octavo.frontend.stream.registry import Registry, Timeouts
from octavo.frontend.stream.running import RunningRequest
from octavo.frontend.text.model_defaults import ModelDefaults
from octavo.frontend.text.pool import TextPool
from octavo.frontend.text.pooling_defaults import PoolingDefaults
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.telemetry import tracing
from octavo.wire.pooling import PoolingModel

_log = logging.getLogger(__name__)

# Seconds until schedulers that have not reset their prefix caches count as away.
_RESET_S: Final = 5.0
# A text that may be cut is tokenized if it could be so many times as long as what is left of it.
_CUT_FACTOR: Final = 64


class Generation:
    """Runs all requests of one frontend. Belongs to one event loop. `model_names` are all names of the model, which
    `reasons` if what it thinks is set apart from what it answers."""

    def __init__(
        self,
        model_names: Sequence[str],
        tokenizer: ModelTokenizer,
        defaults: ModelDefaults,
        scheduler: SchedulerPool,
        text: TextPool,
        access: Access,
        admission: Admission,
        observer: Observer,
        worker_grace_s: float,
        timeouts: Timeouts,
        pooling_defaults: PoolingDefaults = PoolingDefaults(),  # noqa: B008 (frozen)
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        self.model_names = tuple(model_names)
        self.tokenizer = tokenizer
        self.pooling_defaults = pooling_defaults
        self.draining = False
        self.reasons = reasoning_format is not None
        self._defaults = defaults
        self._scheduler = scheduler
        self._text = text
        self._access = access
        self._admission = admission
        self._observer = observer
        self._turns = Turns()
        self.beginnings = Turns.of_beginnings()
        self._registry = Registry(scheduler, timeouts, self._turns)
        readiness = Readiness(scheduler, self.model_name, worker_grace_s)
        self._preparation = Preparation(self.model_name, tokenizer, defaults, text, readiness, reasoning_format)

    @property
    def model_name(self) -> str:
        """Returns the first of the model's names."""
        return self.model_names[0]

    @property
    def stall_timeout_s(self) -> float:
        """Returns the seconds that an interface may wait until its client takes an event; see `pacing.paced`."""
        return self._registry.timeouts.stall_timeout_s

    @property
    def num_running(self) -> int:
        """Returns how many requests are admitted and have not ended, with a reader or without."""
        return self._registry.num_running

    @property
    def ready(self) -> bool:
        """Tells whether a new request would be taken and could run now."""
        return not self.draining and self._scheduler.availability is SchedulerAvailability.READY

    @property
    def makes_progress(self) -> bool:
        """Tells whether requests survive: the scheduler has not been away for longer than its grace."""
        return self._scheduler.away_s() <= self._scheduler.grace_s

    @property
    def recommends_sampling(self) -> bool:
        """Tells whether the model directory says how to sample for a request that does not."""
        return self._defaults.recommends_sampling

    @property
    def frontend_ids(self) -> list[str]:
        """Returns the name of this frontend's registration with each scheduler."""
        return self._scheduler.frontend_ids

    @property
    def latencies(self) -> Latencies:
        """Returns the times that clients have waited for tokens since the start, all requests together."""
        return self._observer.latencies()

    @property
    def max_model_len(self) -> int:
        """Returns the context in tokens: the model's, or less where its workers were started with less."""
        return model_len(self._defaults, self._scheduler.status)

    @property
    def served_model_len(self) -> int:
        """Returns `max_model_len`, or 0 while no worker has said which model it serves."""
        status = self._scheduler.status
        return self.max_model_len if status and status.model else 0

    @property
    def pooling_model(self) -> PoolingModel | None:
        """Returns what the workers' model gives in place of tokens; None for one that generates, or while there is no
        worker."""
        status = self._scheduler.status
        return status.model.pooling if status and status.model else None

    @property
    def kv_memory(self) -> tuple[int, int]:
        """Returns the tokens in a KV block, and how many such blocks all workers have; zeros while there is none, and 0
        blocks where an older scheduler does not count them. Of several sizes it is the one that holds most tokens."""
        status = self._scheduler.status
        if not status or not status.model:
            return 0, 0
        sizes = [(use.block_size, use.num_blocks) for use in status.load.blocks] if status.load else []
        return max(sizes, key=math.prod, default=(status.block_size, 0))

    def generate(
        self, request: GenerationRequest, caller: Caller = ANYBODY, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """Returns an iterator that runs a request from its first step on, and yields the events. `deadline` is a time
        of the event loop's clock.

        The iterator raises `ServiceError`. Closing it aborts the request, unless that may run on without a reader.
        """
        return self._registry.read(functools.partial(self._begin, request, caller, deadline))

    def pool(
        self, request: PoolingRequest, caller: Caller = ANYBODY, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """Returns an iterator as `generate` does, for a request for an output of the model."""
        return self._registry.read(functools.partial(self._begin, request, caller, deadline))

    def attach(
        self, request_id: str, after: int, caller: Caller = ANYBODY, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """Returns the events of a request after the offset `after`; events that were sent before come again unchanged.

        The iterator takes over from an earlier reader. `deadline` ends the reading, not the request. It raises
        `ServiceError`. Closing it is the same as closing that of `generate`.
        """
        find = functools.partial(self._registry.find, request_id, caller, after)
        return self._registry.read(find, after, deadline)

    def request_of(self, request_id: str, caller: Caller = ANYBODY) -> GenerationRequest:
        """Returns the caller's request with that id. Raises `NotFound`; `InvalidRequest` for one without a stream."""
        request = self._registry.find(request_id, caller).request
        if isinstance(request, PoolingRequest):
            raise bad_parameter("request_id", repr(request_id[:128]), "that request has no events to come back to")
        return request

    def prompt_tokens_of(self, request_id: str, caller: Caller = ANYBODY) -> int | None:
        """Returns the tokens in the prompt of the caller's request with that id; None before they are known."""
        running = self._registry.get(request_id, caller)
        return len(running.journal.prompt_token_ids) if running and running.answer else None

    def call_came(self) -> None:
        """Notes that a call was taken in, and another may be behind it: other work gives way for a moment."""
        self._turns.call_came()
        self.beginnings.call_came()

    async def others_first(self) -> None:
        """Lets other streams that have news take it before this one writes its own: see `Turns.others_first`."""
        await self._turns.others_first()

    def check_room(self) -> None:
        """Raises `Overloaded`, and counts a request that was refused, if there is no room for any request at all."""
        try:
            self._admission.check_room()
        except Overloaded as error:
            self._observer.arrived()
            self._observer.refused(error)
            raise

    def abort(self, request_id: str, caller: Caller = ANYBODY) -> bool:
        """Ends the caller's request with that id; returns whether it was running."""
        return self._abort(self._registry.get(request_id, caller))

    def abort_listed(self, listing: Listing) -> bool:
        """Ends the request that a scheduler lists so, of whatever tenant; returns whether it was running here."""
        return self._abort(self._registry.listed(listing))

    def _abort(self, running: RunningRequest | None) -> bool:
        if running is None or running.ended:
            return False
        self._registry.end(running, Aborted(Reason.ABORTED, f"request {running.request_id} was aborted by its id"))
        return True

    def listing_of(self, request_id: str, caller: Caller = ANYBODY) -> Listing | None:
        """Returns the name under which a scheduler lists the caller's request; None while no scheduler holds it.

        Raises `NotFound`.
        """
        return self._scheduler.listing(self._registry.find(request_id, caller))

    def cut_off(self) -> None:
        """Ends all requests that still run, at the end of a drain."""
        self._registry.cut_off()

    async def reset_prefix_caches(self, salt: str | None) -> CacheResets:
        """Has all schedulers forget what is cached, or what of it is behind `salt`. Raises `Unavailable`."""
        return await self._scheduler.reset_prefix_caches(salt, _RESET_S)

    async def encode(self, prompt: Prompt, caller: Caller = ANYBODY, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt's token ids, made off the event loop.

        `add_special_tokens` lets the tokenizer add its own tokens (a BOS) to a prompt that is text. Raises
        `InvalidRequest`, and `Overloaded`, for the call counts as admitted meanwhile, as `decode` does.
        """
        check_form(GenerationRequest(prompt))
        check_prompt_size(prompt, self.max_model_len)
        with self._admitted(prompt, caller):
            return await self._text.encode(prompt, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], caller: Caller = ANYBODY, *, skip_special_tokens: bool) -> str:
        """Returns the text of the ids, made off the event loop.

        Raises `InvalidRequest` for ids outside the vocabulary, and `Overloaded`.
        """
        check_token_ids("ids", token_ids, self._defaults.vocab_size)
        with self._admitted(list(token_ids), caller):
            return await self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def check_model(self, model: str) -> None:
        """Raises `NotFound` unless `model` is empty or a name of the served model."""
        if model and model not in self.model_names:
            raise NotFound(
                Reason.MODEL_NOT_FOUND,
                f"model {model[:256]!r} is not served here; use {self.model_name!r} or leave it out",
                model=model[:256],
                served=self.model_name,
            )

    @contextlib.contextmanager
    def _admitted(self, prompt: Prompt, caller: Caller) -> Iterator[None]:
        """Surrounds work on a prompt that no answer follows, which counts as admitted meanwhile."""
        ticket = self._admission.admit(GenerationRequest(prompt, max_new_tokens=0), caller.tenant)
        try:
            yield
        finally:
            ticket.release()

    def _begin(
        self, request: GenerationRequest | PoolingRequest, caller: Caller, deadline: float | None
    ) -> RunningRequest:
        """Admits a request, and prepares it in a task of its own, for its reader may go away and another come
        meanwhile."""
        running = self._admit(request, caller)
        self._registry.add(running, deadline)
        running.preparing = asyncio.create_task(self._prepare(running))
        return running

    def _admit(self, request: GenerationRequest | PoolingRequest, caller: Caller) -> RunningRequest:
        """Checks a request by its form, books its work, and counts it as arrived, or as refused."""
        self._observer.arrived()
        try:
            self._check(request)
            request_id = self._free_id(request.request_id, caller)
            tenant = self._access.tenant(request, caller)
            ticket = self._admission.admit(request, tenant)
        except ServiceError as error:
            self._observer.refused(error)
            raise
        span = tracing.start_span("request", request.traceparent, request_id=request_id, model=self.model_name)
        return RunningRequest(request, request_id, tenant, caller, time.monotonic(), ticket, span, self._observer)

    def _check(self, request: GenerationRequest | PoolingRequest) -> None:
        if self.draining:
            raise Unavailable(Reason.DRAINING, "this frontend is shutting down; send the request to another one")
        self.check_model(request.model)
        if isinstance(request, PoolingRequest):
            check_pooling_form(request)
            self._check_texts(request)
            return
        check_form(request)
        check_prompt_size(request.prompt, self.max_model_len)
        check_answer_size(request.max_new_tokens, self.max_model_len)

    def _check_texts(self, request: PoolingRequest) -> None:
        # A text that may be cut is tokenized whole, but not one of any size.
        length = self.max_model_len * (_CUT_FACTOR if request.truncate_to is not None else 1)
        for text in request.texts:
            check_prompt_size(text, length)
        if not isinstance(request.prompt, str) and request.truncate_to is None:
            # A prompt of generation leaves room for a token.
            check_prompt_size(request.prompt, self.max_model_len + 1)

    def _free_id(self, request_id: str, caller: Caller) -> str:
        if self._registry.get(request_id, caller):
            raise AlreadyExists(
                Reason.DUPLICATE_ID,
                f"a request with id {request_id!r} is running, or kept to be attached to; wait for it, or leave the id"
                " out to get a fresh one",
                request_id=request_id,
            )
        return request_id or secrets.token_hex(16)

    async def _prepare(self, running: RunningRequest) -> None:
        """Prepares a request, and submits it to a scheduler, which wakes the request's reader from then on."""
        try:
            await self.beginnings.take()
            salt = self._access.salt(running.request, running.caller)
            running.answer = (
                await self._preparation.output_answer(running, running.request, salt)
                if isinstance(running.request, PoolingRequest)
                else await self._preparation.answer(running, running.request, salt)
            )
            running.report_prepared()
            self._scheduler.submit(running)
        except ServiceError as error:
            running.fail(error)
        except Exception:
            log_failure(_log, "a request could not be prepared")
            running.fail(internal_error())
