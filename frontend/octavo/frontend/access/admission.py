"""Bounds requests and their tokens of work, before anything is spent on a request, and measures the rate of work."""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from octavo.frontend.access.access import Bounds
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Overloaded, Reason
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.infill import Infill
from octavo.frontend.request.pooling import PoolingRequest
from octavo.frontend.request.request import GenerationRequest, Prompt

# Tokens per second, until some were counted.
_FIRST_GUESS: Final = 1000.0
_SMOOTHED_OVER_S: Final = 5.0


class ServiceRate:
    """Measures tokens of work per second of the time that there was work; the last seconds count most.

    The mean decays exponentially. Times are seconds of any clock that does not run back.
    """

    def __init__(self, now: float) -> None:
        self._rate = _FIRST_GUESS
        self._at = now

    def done(self, tokens: int, now: float, *, busy: bool) -> None:
        """Counts `tokens` that were computed; `busy` is whether there was work since the last call."""
        self._rate = self.at(now, busy=busy) + tokens / _SMOOTHED_OVER_S

    def at(self, now: float, *, busy: bool) -> float:
        """Returns the rate now, in tokens per second; `busy` is as in `done`."""
        if busy:
            self._rate *= math.exp((self._at - now) / _SMOOTHED_OVER_S)
        self._at = now
        return self._rate


# Bytes of a token of text in most languages and vocabularies, and of the tokens around a chat's message.
_BYTES_PER_TOKEN: Final = 3
_BYTES_PER_MESSAGE: Final = 12
# Tokens of an answer that may take the whole context; most answers end long before.
_GUESSED_ANSWER: Final = 1024
# Bytes of logprobs as they are kept: for a token, and for each of the top tokens beside it.
_BYTES_PER_LOGPROB: Final = 20
_BYTES_PER_CANDIDATE: Final = 12
# The most bytes of logprobs in all answers together, which clients may take their time to read.
_MAX_LOGPROB_BYTES: Final = 1 << 30
_SHORTEST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 60.0


@dataclass
class Held:
    """Counts what is admitted and not released.

    `work_tokens` are tokens still to be computed; `logprob_bytes` is what the logprobs of the answers may take.
    """

    requests: int = 0
    work_tokens: int = 0
    logprob_bytes: int = 0


class Ticket:
    """Holds one request's share of what is admitted. A ticket must be released, whatever becomes of the request."""

    def __init__(self, admission: "Admission", tenant: str, tokens: int, logprob_bytes: int = 0) -> None:
        self._admission = admission
        self._tenant = tenant
        self._logprob_bytes = logprob_bytes
        self._total = tokens
        self._done = 0
        # Tokens of the request that are still to be computed.
        self.work_tokens = tokens
        self._open = True

    def correct(self, tokens: int) -> None:
        """Sets the request's work to `tokens`, once its prompt is tokenized and its limits are resolved."""
        if self._open:
            self._change(more=tokens - self._total)

    def progress(self, tokens: int) -> None:
        """Counts `tokens` of the request's work as computed."""
        if self._open:
            self._change(done=tokens)

    def release(self) -> None:
        """Gives the share back. Idempotent."""
        if self._open:
            self._change(more=-self._total)
            self._open = False
            self._admission.close(self._tenant, self._logprob_bytes)

    def _change(self, more: int = 0, done: int = 0) -> None:
        self._total += more
        self._done += done
        before, self.work_tokens = self.work_tokens, max(0, self._total - self._done)
        self._admission.book(self._tenant, self.work_tokens - before, done)


class Admission:
    """Admits the requests of one frontend, and counts those that it holds. Belongs to one event loop.

    `bounds` are those of tenants that have their own, by name.
    """

    def __init__(
        self,
        config: FrontendConfig,
        bounds: Mapping[str, Bounds] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._bounds = Bounds(config.max_requests, config.max_work_tokens)
        self._tenant_bounds = bounds or {}
        self._other_bounds = Bounds(config.tenant_max_requests, config.tenant_max_work_tokens)
        self._held = Held()
        self._tenants: dict[str, Held] = {}
        self._clock = clock
        self._rng = rng or random.Random()
        self._rate = ServiceRate(clock())

    @property
    def requests(self) -> int:
        """Returns how many requests are held."""
        return self._held.requests

    @property
    def work_tokens(self) -> int:
        """Returns the tokens of all held requests that are still to be computed."""
        return self._held.work_tokens

    @property
    def tenants(self) -> Mapping[str, Held]:
        """Returns what each tenant with any request holds, by its name."""
        return self._tenants

    @property
    def service_rate(self) -> float:
        """Returns the tokens of work that are computed per second."""
        return self._rate.at(self._clock(), busy=self.requests > 0)

    def admit(self, request: GenerationRequest | PoolingRequest, tenant: str) -> Ticket:
        """Admits `request`, by an estimate of its work from its form alone.

        Raises `Overloaded`, with the seconds after which there should be room.
        """
        tokens, logprob_bytes = estimated_work(request), estimated_logprob_bytes(request)
        self._check_all(tokens, logprob_bytes)
        self._check_tenant(tenant, tokens)
        self._tenants.setdefault(tenant, Held())
        self.book(tenant, tokens)
        for held in (self._held, self._tenants[tenant]):
            held.requests += 1
        self._held.logprob_bytes += logprob_bytes
        return Ticket(self, tenant, tokens, logprob_bytes)

    def book(self, tenant: str, tokens: int, done: int = 0) -> None:
        """Adds `tokens` (may be negative) to a ticket's work, and counts `done` as computed. For tickets alone."""
        # Before the counts change, for the rate depends on whether anything was held until now.
        self._rate.done(done, self._clock(), busy=self._held.requests > 0)
        self._held.work_tokens += tokens
        self._tenants[tenant].work_tokens += tokens

    def close(self, tenant: str, logprob_bytes: int = 0) -> None:
        """Takes back a ticket with no work left. For tickets alone."""
        self._held.requests -= 1
        self._held.logprob_bytes -= logprob_bytes
        self._tenants[tenant].requests -= 1
        if not self._tenants[tenant].requests:
            del self._tenants[tenant]

    def check_room(self) -> None:
        """Raises `Overloaded` where there is no room for any request."""
        held = self._held
        if held.requests >= self._bounds.max_requests:
            raise self._refusal(
                Reason.TOO_MANY_REQUESTS, f"the server holds {held.requests} requests, as many as it may", held
            )

    def _check_all(self, tokens: int, logprob_bytes: int) -> None:
        self.check_room()
        held, bounds = self._held, self._bounds
        if _too_much(held, tokens, bounds.max_work_tokens):
            raise self._refusal(
                Reason.TOO_MUCH_WORK,
                f"the request is about {tokens} tokens of work, and the server holds {held.work_tokens} of the"
                f" {bounds.max_work_tokens} that it may",
                held,
            )
        if logprob_bytes and held.logprob_bytes and held.logprob_bytes + logprob_bytes > _MAX_LOGPROB_BYTES:
            raise self._refusal(
                Reason.TOO_MUCH_WORK,
                f"the logprobs of the answer may take {logprob_bytes >> 20} MiB, and the server holds answers of"
                f" {held.logprob_bytes >> 20} of the {_MAX_LOGPROB_BYTES >> 20} MiB that they may; ask for fewer tokens"
                " or logprobs",
                held,
            )

    def _check_tenant(self, tenant: str, tokens: int) -> None:
        held, bounds = self._tenants.get(tenant, Held()), self._tenant_bounds.get(tenant, self._other_bounds)
        if bounds.max_requests and held.requests >= bounds.max_requests:
            raise self._refusal(
                Reason.TENANT_QUOTA, f"this tenant has {held.requests} requests here, as many as it may", held
            )
        if bounds.max_work_tokens and _too_much(held, tokens, bounds.max_work_tokens):
            raise self._refusal(
                Reason.TENANT_QUOTA,
                f"the request is about {tokens} tokens of work, and this tenant has {held.work_tokens} of the"
                f" {bounds.max_work_tokens} that it may have here",
                held,
            )

    def _refusal(self, reason: Reason, what: str, held: Held) -> Overloaded:
        retry_after_s = self._retry_after_s(held)
        return Overloaded(
            reason,
            f"{what}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
            requests=held.requests,
            work_tokens=held.work_tokens,
        )

    def _retry_after_s(self, held: Held) -> float:
        """Returns the seconds in which `held` should be computed, varied at random so that clients come back apart."""
        seconds = held.work_tokens / max(self.service_rate, 1.0) * self._rng.uniform(0.5, 1.5)
        return min(max(seconds, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)


def _too_much(held: Held, tokens: int, bound: int) -> bool:
    # A request that is larger than the bound by itself would otherwise never run.
    return held.requests > 0 and held.work_tokens + tokens > bound


def estimated_work(request: GenerationRequest | PoolingRequest) -> int:
    """Estimates the tokens of the prompt and of all answers, from the request's form alone."""
    if isinstance(request, PoolingRequest):
        tokens = sum(map(_prompt_tokens, (request.prompt, request.pair or "")))
        return tokens if request.truncate_to is None else min(tokens, request.truncate_to)
    answer = _GUESSED_ANSWER if request.max_new_tokens is None else request.max_new_tokens
    return _prompt_tokens(request.prompt) + request.parallel * answer


def estimated_logprob_bytes(request: GenerationRequest | PoolingRequest) -> int:
    """Estimates the bytes of all answers' logprobs until the client has read them, from the request's form alone."""
    if isinstance(request, PoolingRequest) or request.top_logprobs is None:
        return 0
    answer = _GUESSED_ANSWER if request.max_new_tokens is None else request.max_new_tokens
    return request.parallel * answer * (_BYTES_PER_LOGPROB + request.top_logprobs * _BYTES_PER_CANDIDATE)


def _prompt_tokens(prompt: Prompt) -> int:
    match prompt:
        case str():
            return -(-_num_bytes(prompt) // _BYTES_PER_TOKEN)
        case Infill():
            return -(-prompt.num_bytes // _BYTES_PER_TOKEN)
        case Chat():
            return -(-(prompt.num_bytes + len(prompt.messages) * _BYTES_PER_MESSAGE) // _BYTES_PER_TOKEN)
    return len(prompt)


def _num_bytes(text: str) -> int:
    # Most texts are ASCII, and of those the length is known.
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
