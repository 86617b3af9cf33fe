"""Makes a client's request into the journal that a scheduler gets: waits for workers, tokenizes, resolves limits."""

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.frontend.answer_parsers.reasoning import Reasoning, ReasoningFormat
from octavo.frontend.errors import DeadlineExceeded, InvalidRequest, NotFound, Reason, Unavailable, bad_parameter
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.pooling import PoolingRequest
from octavo.frontend.request.request import Caller, GenerationRequest, Prompt
from octavo.frontend.request.validation import check_prediction_size, check_prompt_size, check_room
from octavo.frontend.scheduler.client import SchedulerAvailability, unreachable
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.answer import Answer
from octavo.frontend.stream.pooling import OutputAnswer
from octavo.frontend.stream.running import RunningRequest
from octavo.frontend.text.model_defaults import ModelDefaults
from octavo.frontend.text.pool import TextPool
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.wire.pooling import PoolingModel, PoolingParams, PoolingTask
from octavo.wire.requests import CacheKey, ServiceStatus
from octavo.wire.sampling import MAX_GRAMMAR, MAX_STOP_TOKEN_IDS, SamplingParams

# Logprobs of a prompt travel in one message, of at most 32 MiB, at up to 17 bytes each.
MAX_PROMPT_LOGPROBS = 1 << 20
# The most tokens with which a template begins or ends a reasoning at the end of a prompt.
_MOST_OPENING_TOKENS: Final = 32


@dataclass(frozen=True)
class Limits:
    """Holds what the model and its workers allow, in tokens, and in sequences that run side by side."""

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    max_parallel: int
    block_size: int = 1


def model_len(defaults: ModelDefaults, status: ServiceStatus | None) -> int:
    """Returns the context in tokens: the model's, or less where its workers were started with less."""
    info = status.model if status else None
    return min(defaults.max_model_len, info.max_model_len) if info else defaults.max_model_len


def resolve_sampling(
    request: GenerationRequest,
    prompt_token_ids: Sequence[int],
    defaults: ModelDefaults,
    limits: Limits,
    grammar: str = "",
) -> SamplingParams:
    """Returns the parameters in force: the request's, or else the model's defaults.

    `grammar` is the grammar of the request's constraint. Raises `InvalidRequest` for token ids, a length or a limit
    that the model or the workers cannot take.
    """
    _check_parallel(request, limits.max_parallel)
    check_token_ids("prompt token id", prompt_token_ids, limits.vocab_size)
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
        check_token_ids(field, getattr(request, field), limits.vocab_size)
    _check_prompt_logprobs(request.prompt_logprobs, len(prompt_token_ids))
    stop_token_ids = _stop_token_ids(request, defaults)
    _check_choice(request, stop_token_ids, limits.vocab_size)
    return SamplingParams(
        **defaults.in_force(request),
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        num_sequences=request.num_sequences if request.best_of is None else request.best_of,
        beam=request.beam,
        max_tokens=_max_tokens(request, len(prompt_token_ids), limits, defaults.max_new_tokens),
        min_tokens=request.min_new_tokens,
        stop_token_ids=stop_token_ids,
        logit_bias=sorted(request.logit_bias.items()),
        allowed_token_ids=sorted(set(request.allowed_token_ids)),
        banned_token_ids=sorted(set(request.banned_token_ids)),
        # The best are known by their logprobs, whoever sees these.
        logprobs=0 if request.top_logprobs is None and request.best_of is not None else request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
    )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` for an id that the vocabulary does not have."""
    # Without a loop in Python, for this runs on the event loop.
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise bad_parameter(name, token_id, f"the vocabulary ends at {vocab_size - 1}")


_ADVICE = {
    None: "it generates text: use /v1/completions or /v1/chat/completions",
    PoolingTask.EMBED: "it makes vectors: use /v1/embeddings, /score or /rerank",
    PoolingTask.CLASSIFY: "it scores classes: use /classify, or with one class /score or /rerank",
}


def check_task(pooling: PoolingModel | None, task: PoolingTask | None, model_name: str) -> None:
    """Raises `InvalidRequest` if a model does not do what it is asked to, None: to generate."""
    done = None if pooling is None else pooling.task
    if done is not task:
        asked = "generate" if task is None else task.value
        raise InvalidRequest(
            Reason.WRONG_TASK, f"the model {model_name} cannot {asked}; {_ADVICE[done]}", model=model_name, task=asked
        )


def find_prefix(name: str, known: Mapping[str, list[int]], *, tells_names: bool) -> list[int]:
    """Returns the token ids of a pinned prefix. Raises `NotFound`, with the known names if `tells_names`."""
    if name in known:
        return known[name]
    names = ", ".join(map(repr, sorted(known))) or "none"
    others = f"pinned are: {names[:2048]}" if tells_names else "ask who runs this server for the names"
    raise NotFound(Reason.PREFIX_NOT_FOUND, f"no prefix {name[:256]!r} is pinned; {others}", pinned_prefix=name[:256])


def _check_parallel(request: GenerationRequest, most: int) -> None:
    if request.parallel > most:
        field = "beam_width" if request.beam else "num_sequences" if request.best_of is None else "best_of"
        raise bad_parameter(field, request.parallel, f"at most {most} sequences run side by side here; lower it")


def _check_prompt_logprobs(top: int | None, prompt_tokens: int) -> None:
    if top is not None and prompt_tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        rule = f"with {prompt_tokens} prompt tokens that is more than {MAX_PROMPT_LOGPROBS} logprobs in all; lower it"
        raise bad_parameter("prompt_logprobs", top, rule)


def _check_choice(request: GenerationRequest, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` if no token is left to choose, before `min_new_tokens` or after."""
    excluded = set(request.banned_token_ids) | set(stop_token_ids if request.min_new_tokens else ())
    allowed = set(request.allowed_token_ids)
    if (len(allowed - excluded) if allowed else vocab_size - len(excluded)) < 1:
        field = "allowed_token_ids" if allowed else "banned_token_ids"
        rule = "what is banned, and what stops before min_new_tokens, must leave a token to choose"
        raise bad_parameter(field, "all excluded", rule)


def _stop_token_ids(request: GenerationRequest, defaults: ModelDefaults) -> list[int]:
    eos = frozenset() if request.ignore_eos else defaults.eos_token_ids
    ids = sorted(eos | set(request.stop_token_ids))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_parameter("stop_token_ids", f"{len(ids)} ids with EOS", f"at most {MAX_STOP_TOKEN_IDS} may be")
    return ids


def _max_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits, default: int | None) -> int:
    check_room(prompt_tokens, limits.max_model_len)
    room, asked = limits.max_model_len - prompt_tokens, request.max_new_tokens
    if asked is not None and asked > room:
        raise bad_parameter(
            "max_new_tokens",
            asked,
            f"the prompt's {prompt_tokens} tokens leave {room} of the context's {limits.max_model_len};"
            " lower it, or leave it out to use what there is",
        )
    room = min(room, _room_in_cache(request, prompt_tokens, limits))
    if request.min_new_tokens > room:
        raise bad_parameter("min_new_tokens", request.min_new_tokens, f"there is room for {room} new tokens; lower it")
    # A recommended limit gives way to the one that is asked for, and to the room that there is.
    return asked or (room if default is None else min(room, max(default, request.min_new_tokens)))


def _room_in_cache(request: GenerationRequest, prompt_tokens: int, limits: Limits) -> int:
    """Returns the new tokens that fit the KV cache with nothing shared, each sequence in blocks of its own.

    Raises `InvalidRequest` if the request cannot fit.
    """
    needed = prompt_tokens + max(request.max_new_tokens or 1, request.min_new_tokens)
    capacity_tokens = limits.capacity_tokens
    share = capacity_tokens // request.parallel // limits.block_size * limits.block_size
    if needed > share:
        sequences = f"{request.parallel} sequences of {needed}" if request.parallel > 1 else str(needed)
        raise InvalidRequest(
            Reason.NEVER_FITS_KV,
            f"the request needs room for {sequences} tokens and the largest worker's KV cache holds"
            f" {capacity_tokens}; shorten the prompt, lower max_new_tokens or the number of sequences, or give the"
            " workers more cache",
            needed_tokens=needed * request.parallel,
            capacity_tokens=capacity_tokens,
        )
    return share - prompt_tokens


class Readiness:
    """Waits, as long as is worth it, for the workers and the pinned prefixes that a new request needs."""

    def __init__(self, scheduler: SchedulerPool, model_name: str, worker_grace_s: float) -> None:
        self._scheduler = scheduler
        self._model_name = model_name
        self._worker_grace_s = worker_grace_s
        self._asking = asyncio.Lock()
        # Questions what is pinned that were begun, and the latest one that was answered.
        self._num_asked = self._num_told = 0

    async def wait(self, since: float | None = None) -> ServiceStatus:
        """Returns once there are workers of this frontend's model. Raises `Unavailable`.

        `since` is when the request began to wait (`time.monotonic`), if not with this call.
        """
        waiting_since = time.monotonic() if since is None else since
        while (availability := self._scheduler.availability) is not SchedulerAvailability.READY:
            self._check_worth_waiting(availability, time.monotonic() - waiting_since)
            await self._scheduler.changed()
        status = self._scheduler.status
        assert status is not None
        return status

    async def prefix(self, name: str, *, tells_names: bool) -> list[int]:
        """Returns the token ids of a pinned prefix; asks the scheduler for one that is not known here.

        Raises `NotFound`, with the known names if `tells_names`, and `Unavailable`.
        """
        if name not in self._scheduler.prefixes.known:
            await self._ask_prefixes()
        return find_prefix(name, self._scheduler.prefixes.known, tells_names=tells_names)

    async def _ask_prefixes(self) -> None:
        """Returns once every scheduler at hand has said what is pinned, asked after this call.

        Whoever has pinned a prefix may name it before the news of it is here. All who call meanwhile share the next
        question, so that unknown names cost the schedulers one question at a time.
        """
        begun, since = self._num_asked, time.monotonic()
        async with self._asking:
            if self._num_told > begun:
                return
            self._num_asked += 1
            self._scheduler.ask_prefixes()
            while not self._scheduler.prefixes.reported:
                await self.wait(since)
                await self._scheduler.changed()
            self._num_told = self._num_asked

    def _check_worth_waiting(self, availability: SchedulerAvailability, waited_s: float) -> None:
        away_s = self._scheduler.away_s()
        if availability is SchedulerAvailability.NO_SCHEDULER and away_s > self._scheduler.grace_s:
            raise unreachable(away_s)
        if availability is SchedulerAvailability.NO_WORKER and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER, f"no worker has registered in {waited_s:.0f} s; start one, or try again later"
            )
        if availability is SchedulerAvailability.STALLED and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER,
                "the workers have answered no step for long, though there is work; the scheduler's log says which and"
                " why; try again later",
            )
        if availability is SchedulerAvailability.MODEL_MISMATCH:
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


class Preparation:
    """Prepares the requests of one frontend: does all that may wait or take long before a request is submitted."""

    def __init__(
        self,
        model_name: str,
        tokenizer: ModelTokenizer,
        defaults: ModelDefaults,
        text: TextPool,
        readiness: Readiness,
        reasoning_format: ReasoningFormat | None,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._text = text
        self._readiness = readiness
        self._reasoning_format = reasoning_format

    async def answer(self, running: RunningRequest, request: GenerationRequest, salt: str) -> Answer:
        """Returns the answer, not begun, of a journal with which `running` can be submitted for its `request`.

        `salt` keeps its cached prefixes apart from those of others. Raises `ServiceError`.
        """
        limits = await self._limits_in_time(request.max_queue_s, None)
        prefix = await self._prefix(request.pinned_prefix, running.caller) if request.pinned_prefix else []
        check_prompt_size(request.prompt, limits.max_model_len)
        check_prediction_size(request.prediction, limits.max_model_len)
        own = await self._text.encode(request.prompt, add_special_tokens=request.add_special_tokens and not prefix)
        prompt_token_ids = prefix + own
        predicted_token_ids = await self._predicted(request, limits)
        reasoning = self._reasoning(request.prompt, prompt_token_ids) if self._reasoning_format else None
        grammar = await self._grammar(request, reasoning)
        journal = Journal(
            running.request_id,
            prompt_token_ids,
            resolve_sampling(request, prompt_token_ids, self._defaults, limits, grammar),
            running.arrived_at,
            priority=request.priority,
            tenant=running.tenant,
            cache_key=CacheKey(salt=salt, salted_from=len(prefix)),
            max_queue_s=request.max_queue_s,
            traceparent=running.span.traceparent,
            predicted_token_ids=predicted_token_ids,
        )
        model, eos_token_ids = request.model or self._model_name, self._defaults.eos_token_ids
        return Answer(journal, request, model, self._tokenizer, eos_token_ids, reasoning)

    async def output_answer(self, running: RunningRequest, request: PoolingRequest, salt: str) -> OutputAnswer:
        """Returns the same for a request for an output of the model. Raises `ServiceError`."""
        limits = await self._limits_in_time(request.max_queue_s, request.task)
        longest = limits.max_model_len
        cut = None if request.truncate_to is None else min(request.truncate_to, longest)
        pair_start = 0
        if isinstance(request.prompt, str):
            token_ids, pair_start = await self._text.encode_whole(
                request.prompt, request.pair, cut, add_special_tokens=request.add_special_tokens
            )
        else:
            token_ids = list(request.prompt)[:cut]
        if not token_ids:
            raise bad_parameter("input", "without a token", "there must be at least one in each text")
        if len(token_ids) > longest:
            raise InvalidRequest(
                Reason.PROMPT_TOO_LONG,
                f"a text has {len(token_ids)} tokens, and the model takes {longest}; shorten it, or have it cut with"
                " truncate_prompt_tokens",
                prompt_tokens=len(token_ids),
                max_model_len=longest,
            )
        check_token_ids("token id", token_ids, limits.vocab_size)
        journal = Journal(
            running.request_id,
            token_ids,
            SamplingParams(max_tokens=1),
            running.arrived_at,
            priority=request.priority,
            tenant=running.tenant,
            cache_key=CacheKey(salt=salt),
            max_queue_s=request.max_queue_s,
            traceparent=running.span.traceparent,
            pooling=PoolingParams(request.task, pair_start),
        )
        return OutputAnswer(journal)

    async def _predicted(self, request: GenerationRequest, limits: Limits) -> Sequence[int]:
        """Returns the tokens that the client expects the answer to have, none where it expects nothing. Raises
        `InvalidRequest`."""
        if not request.prediction:
            return ()
        token_ids = await self._text.encode(request.prediction, add_special_tokens=False)
        check_prediction_size(token_ids, limits.max_model_len)
        check_token_ids("prediction", token_ids, limits.vocab_size)
        return token_ids

    def _reasoning(self, prompt: Prompt, token_ids: Sequence[int]) -> Reasoning | None:
        """Returns how what is thought is set apart in the answer to a chat, None where nothing is."""
        if self._reasoning_format is None or not isinstance(prompt, Chat):
            return None
        if prompt.continue_final_message:
            return self._reasoning_format.after("", prompt.messages[-1].content)
        return self._reasoning_format.after(
            self._tokenizer.decode(token_ids[-_MOST_OPENING_TOKENS:], skip_special_tokens=False)
        )

    async def _prefix(self, name: str, caller: Caller) -> list[int]:
        # The names of prefixes tell for whom they are pinned.
        return await self._readiness.prefix(name, tells_names=caller.trusted)

    async def _limits_in_time(self, max_queue_s: float | None, task: PoolingTask | None) -> Limits:
        """Waits for workers and returns their limits; the wait counts as waiting to be computed.

        Raises `DeadlineExceeded` after `max_queue_s` seconds, `InvalidRequest` if the model has another task than that,
        None: to generate.
        """
        try:
            async with asyncio.timeout(max_queue_s):
                status = await self._readiness.wait()
                assert status.model is not None
                if status.model.pooling is not None or task is not None:
                    check_task(status.model.pooling, task, self._model_name)
                return self._limits(status)
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

    async def _grammar(self, request: GenerationRequest, reasoning: Reasoning | None) -> str:
        around = self._around(request, reasoning) if reasoning or request.max_reasoning_tokens is not None else ""
        grammar = await self._text.compile(request.constraint, around) if request.constraint or around else ""
        if len(grammar) > MAX_GRAMMAR:
            raise InvalidRequest(
                Reason.BAD_CONSTRAINT,
                f"the constraint is a grammar of {len(grammar)} characters, and at most {MAX_GRAMMAR} may be; ask for"
                " something simpler",
            )
        return grammar

    def _around(self, request: GenerationRequest, reasoning: Reasoning | None) -> str:
        """Returns the grammar of reasoning that comes before an answer, "" where it needs none. Raises
        `InvalidRequest`."""
        if reasoning is None:
            if request.max_reasoning_tokens is not None:
                rule = (
                    "it needs a chat, and a model whose reasoning is known here; leave it out, or start the server with"
                    " --reasoning-parser"
                )
                raise bad_parameter("max_reasoning_tokens", request.max_reasoning_tokens, rule)
            return ""
        try:
            return reasoning.grammar(
                self._tokenizer.added_token_id,
                ends=self._defaults.eos_token_ids,
                max_tokens=request.max_reasoning_tokens,
                is_constrained=request.constraint is not None,
                is_framed=request.constraint is not None and request.constraint.framed,
            )
        except ValueError as error:
            raise bad_parameter(
                "max_reasoning_tokens", request.max_reasoning_tokens, f"{error}; leave it out"
            ) from None
