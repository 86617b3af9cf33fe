"""From a request to the journal that the scheduler gets: all that may wait, and all that may take long."""

import asyncio

from octavo.frontend.caller import Caller
from octavo.frontend.completion import Completion, EndRules
from octavo.frontend.errors import DeadlineExceeded, InvalidRequest, Reason
from octavo.frontend.journal import Journal
from octavo.frontend.model_defaults import ModelDefaults
from octavo.frontend.readiness import Readiness
from octavo.frontend.request import GenerationRequest
from octavo.frontend.resolution import Limits, model_len, resolve_sampling
from octavo.frontend.running import Running
from octavo.frontend.stop_strings import StopStrings
from octavo.frontend.stream import Shape
from octavo.frontend.text_pool import TextPool
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.validation import check_prompt_size
from octavo.wire.requests import CacheKey, ServiceStatus
from octavo.wire.sampling import MAX_GRAMMAR, SamplingParams


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

    async def journal(self, running: Running) -> Journal:
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
