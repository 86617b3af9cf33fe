"""The single path behind every door: from a request to its events, whatever happens to the processes behind."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from octavo.frontend.access import Access
from octavo.frontend.admission import Admission
from octavo.frontend.answer import Answer
from octavo.frontend.caller import ANYBODY, Caller
from octavo.frontend.completion import Completion, EndRules
from octavo.frontend.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    Reason,
    Unavailable,
)
from octavo.frontend.events import Emitted, Event, Started
from octavo.frontend.journal import Journal
from octavo.frontend.model_defaults import ModelDefaults
from octavo.frontend.observer import Observer
from octavo.frontend.reader import Reader
from octavo.frontend.readiness import Readiness
from octavo.frontend.request import GenerationRequest, Prompt
from octavo.frontend.resolution import Limits, check_token_ids, resolve_sampling
from octavo.frontend.scheduler_client import Availability, SchedulerClient
from octavo.frontend.scheduler_session import LiveRequest
from octavo.frontend.stop_strings import StopStrings
from octavo.frontend.text_pool import TextPool
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.validation import check_form, check_prompt_size
from octavo.wire.requests import ServiceStatus
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import ModelInfo


@dataclass
class _Running:
    """A request from its check to the end of its stream. `submitted` is set once the scheduler has it."""

    request_id: str
    reader: Reader = field(default_factory=Reader)
    submitted: LiveRequest | None = None


class Generation:
    """All running requests of one frontend. Belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        tokenizer: ModelTokenizer,
        defaults: ModelDefaults,
        scheduler: SchedulerClient,
        text: TextPool,
        access: Access,
        admission: Admission,
        observer: Observer,
        worker_grace_s: float,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.draining = False
        self._defaults = defaults
        self._scheduler = scheduler
        self._text = text
        self._access = access
        self._admission = admission
        self._observer = observer
        self._readiness = Readiness(scheduler, model_name, worker_grace_s)
        self._running: dict[str, _Running] = {}

    @property
    def num_running(self) -> int:
        """Requests between their check and the end of their stream."""
        return len(self._running)

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken and could run now."""
        return not self.draining and self._scheduler.availability is Availability.READY

    @property
    def max_model_len(self) -> int:
        """The context in tokens: the model's, or less where its workers were started with less."""
        info = _model_of(self._scheduler.status)
        return min(self._defaults.max_model_len, info.max_model_len) if info else self._defaults.max_model_len

    @property
    def served_model_len(self) -> int:
        """`max_model_len`, or 0 while no worker has said what it serves."""
        return self.max_model_len if _model_of(self._scheduler.status) else 0

    async def generate(
        self, request: GenerationRequest, caller: Caller = ANYBODY, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """The events of one request. `deadline` is a time of the event loop's clock.

        Raises `ServiceError`. Closing the iterator aborts the request.
        """
        running = self._admit(request)
        try:
            offset = 0
            async for event in self._run(request, running, deadline):
                offset += 1
                yield Emitted(offset, event)
        except TimeoutError:
            raise DeadlineExceeded(
                Reason.DEADLINE, "the deadline passed before the answer was complete; allow more time or ask for less"
            ) from None
        finally:
            del self._running[running.request_id]
            if running.submitted is not None:
                self._scheduler.release(running.submitted)

    def abort(self, request_id: str, caller: Caller = ANYBODY) -> bool:
        """Ends a request of the caller's tenant by its id; whether it was running."""
        running = self._running.get(request_id)
        if running is None:
            return False
        running.reader.fail(Aborted(Reason.ABORTED, f"request {request_id} was aborted by its id"))
        return True

    def cut_off(self) -> None:
        """Ends what still runs, at the end of a drain."""
        for running in self._running.values():
            running.reader.fail(
                Unavailable(
                    Reason.DRAINING, "this frontend shut down before the answer was complete; send it to another"
                )
            )

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids, made off the event loop; `add_special_tokens` is of a text: whether the tokenizer
        adds what it adds by itself.

        Raises `InvalidRequest`.
        """
        check_prompt_size(prompt, self.max_model_len)
        return await self._text.encode(prompt, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids, made off the event loop. Raises `InvalidRequest` for ids outside the vocabulary."""
        check_token_ids("ids", token_ids, self._defaults.vocab_size)
        return await self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def check_model(self, model: str) -> None:
        """Raises `NotFound` unless `model` is empty or the name of the one served."""
        if model not in ("", self.model_name):
            raise NotFound(
                Reason.MODEL_NOT_FOUND,
                f"model {model[:256]!r} is not served here; use {self.model_name!r} or leave it out",
                model=model[:256],
                served=self.model_name,
            )

    def _admit(self, request: GenerationRequest) -> _Running:
        if self.draining:
            raise Unavailable(Reason.DRAINING, "this frontend is shutting down; send the request to another one")
        self.check_model(request.model)
        check_form(request)
        request_id = request.request_id or secrets.token_hex(16)
        if request_id in self._running:
            raise AlreadyExists(
                Reason.DUPLICATE_ID,
                f"a request with id {request_id!r} is running; wait for it, or leave the id out to get a fresh one",
                request_id=request_id,
            )
        running = self._running[request_id] = _Running(request_id)
        return running

    async def _run(self, request: GenerationRequest, running: _Running, deadline: float | None) -> AsyncIterator[Event]:
        async with asyncio.timeout_at(deadline):
            journal = await self._prepare(request, running)
            submitted = running.submitted = self._scheduler.submit(journal, running.reader)
            while not journal.begun:
                await running.reader.wait()
        yield self._started(journal)
        answer = self._answer(request, journal)
        while True:
            events = answer.advance()
            for index in answer.ended_here():
                self._scheduler.end_sequence(submitted, index)
            for event in events:
                yield event
            if answer.finished:
                break
            answer.check_ends()
            async with asyncio.timeout_at(deadline):
                await running.reader.wait()
        yield answer.usage()

    async def _prepare(self, request: GenerationRequest, running: _Running) -> Journal:
        arrived_at = time.monotonic()
        check_prompt_size(request.prompt, self.max_model_len)
        limits = self._limits(await self._readiness.wait(running.reader))
        name = request.pinned_prefix
        prefix = await self._readiness.prefix(name, running.reader) if name else []
        prompt_token_ids = prefix + await self.encode(request.prompt, add_special_tokens=not prefix)
        running.reader.check()
        return Journal(
            running.request_id,
            prompt_token_ids,
            resolve_sampling(request, prompt_token_ids, self._defaults, limits),
            arrived_at,
            priority=request.priority,
            tenant=request.tenant,
            salt=request.salt,
        )

    def _limits(self, status: ServiceStatus) -> Limits:
        assert status.model is not None
        return Limits(
            status.model.vocab_size,
            self.max_model_len,
            status.capacity_tokens,
            status.max_parallel,
            status.block_size,
        )

    def _started(self, journal: Journal) -> Started:
        return Started(
            request_id=journal.request_id,
            model=self.model_name,
            prompt_token_ids=journal.prompt_token_ids,
            seed=journal.sampling.seed,
            prompt_logprobs=journal.prompt_logprobs or [],
        )

    def _answer(self, request: GenerationRequest, journal: Journal) -> Answer:
        completions = [self._completion(request, journal.sampling) for _ in journal.sequences]
        return Answer(journal, completions, num_results=request.num_sequences, incremental=request.incremental)

    def _completion(self, request: GenerationRequest, sampling: SamplingParams) -> Completion:
        rules = EndRules(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            eos_token_ids=self._defaults.eos_token_ids - set(request.stop_token_ids),
            include_stop=request.include_stop,
        )
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        return Completion(rules, detokenizer, StopStrings(request.stop_strings, include_stop=request.include_stop))


def _model_of(status: ServiceStatus | None) -> ModelInfo | None:
    return status.model if status else None
