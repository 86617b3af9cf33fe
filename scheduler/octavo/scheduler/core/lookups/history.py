"""The history of lookups: where the beginnings of admitted requests were found, and why the rest was not.

A lookup is noted when a request is admitted, without a look at its tokens; why something was missing is worked out when
somebody asks, from the lookups before it. Only those of the same tenant, adapter and salt are compared token by token.
"""

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from octavo.scheduler.core.sequence import Lookup, TierTokens
from octavo.wire.requests import CacheKey

# Lookups that are remembered, and the tokens of their prompts and answers.
MOST_LOOKUPS: Final = 1024
MOST_TOKENS: Final = 1 << 18
# Tokens that are compared at a time.
_CHUNK: Final = 512


class MissReason(enum.StrEnum):
    """Says why no more of a request was found.

    SHORT: what is left fills no block before the last token, which is always computed. OFF: requests share nothing
    here. BYPASSED: its prompt's log probabilities are wanted. EVICTED: it made way for others. OTHER_WORKER: it was
    computed elsewhere. NOT_KEPT: it was computed there, but is gone for a reason that is not known any more, or was not
    ready. DIFFERS: the longest beginning that is known goes on with another token. ENDS: it does not go on. OTHER_SALT:
    it was computed behind another salt. UNKNOWN: nothing of the kind is remembered.
    """

    SHORT = "short"
    OFF = "off"
    BYPASSED = "bypassed"
    EVICTED = "evicted"
    OTHER_WORKER = "other_worker"
    NOT_KEPT = "not_kept"
    DIFFERS = "differs"
    ENDS = "ends"
    OTHER_SALT = "other_salt"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """Says how many of a request's `num_tokens` were `found` in which tier, and why not the one at `position`.

    With DIFFERS that token is `token`, and that of the longest known beginning `other_token`. With EVICTED it was taken
    `evicted_s` seconds before. With OTHER_WORKER it is on the worker `elsewhere`, if that is still there.
    """

    num_tokens: int
    found: TierTokens
    worker_id: str
    reason: MissReason
    position: int
    token: int | None = None
    other_token: int | None = None
    evicted_s: float | None = None
    elsewhere: str = ""

    def blurred(self) -> "CacheExplanation":
        """Returns what may be told to those who must not learn what others send: nothing that a prefix hit, of whole
        blocks behind the same salt, would not tell them."""
        if self.reason not in (MissReason.DIFFERS, MissReason.ENDS, MissReason.OTHER_SALT):
            return self
        position = self.found.total
        return replace(self, reason=MissReason.UNKNOWN, position=position, token=None, other_token=None)


class LookupHistory:
    """Remembers the lookups of requests admitted last, oldest first."""

    def __init__(self) -> None:
        self._lookups: deque[Lookup] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._lookups)

    @property
    def num_tokens(self) -> int:
        """Counts the tokens that are remembered: of prompts, and of answers that have ended."""
        return self._num_tokens

    def add(self, lookup: Lookup) -> None:
        """Remembers a lookup; the oldest ones make way."""
        self._lookups.append(lookup)
        lookup.num_counted = len(lookup.request.prompt_token_ids)
        self._num_tokens += lookup.num_counted
        self._shrink()

    def ended(self, lookup: Lookup) -> None:
        """Notes that a request is no longer held, so that its answer is kept for this history alone."""
        lookup.is_over = True
        if lookup.num_counted:
            lookup.num_counted += len(lookup.output)
            self._num_tokens += len(lookup.output)
            self._shrink()

    def _shrink(self) -> None:
        while len(self._lookups) > MOST_LOOKUPS or self._num_tokens > MOST_TOKENS:
            self._drop(self._lookups.popleft())

    def _drop(self, lookup: Lookup) -> None:
        self._num_tokens -= lookup.num_counted
        lookup.num_counted = 0

    def forget(self, salt: str | None) -> None:
        """Forgets what was looked up behind a salt; for None all."""
        kept = deque(each for each in self._lookups if salt is not None and each.request.cache_key.salt != salt)
        for lookup in self._lookups:
            if salt is None or lookup.request.cache_key.salt == salt:
                self._drop(lookup)
        self._lookups = kept

    def of(self, request_id: str) -> list[Lookup]:
        """Returns the lookups of ended requests of this id, of each frontend the last one."""
        found = {each.frontend_id: each for each in self._lookups if each.request.request_id == request_id}
        return [each for each in found.values() if each.is_over]

    def before(self, lookup: Lookup) -> list[Lookup]:
        """Returns the other lookups of the same tenant and adapter that were not later, the latest first."""
        request = lookup.request
        mine = (request.tenant, request.cache_key.adapter)
        earlier = []
        for each in self._lookups:
            if each is lookup:
                break
            if each.at <= lookup.at and (each.request.tenant, each.request.cache_key.adapter) == mine:
                earlier.append(each)
        return earlier[::-1]


def explain_cache(
    lookup: Lookup, history: LookupHistory, evicted_at: float | None, *, is_private: bool
) -> CacheExplanation:
    """Returns where a request was found when it was admitted, and why the rest was not. `evicted_at` is when the
    first block that was missing had made way, if it had, and that is known.

    Where it `is_private`, who asks is an operator, or the request's own tenant and known to be: anybody else is to be
    given what is `blurred` of it.
    """
    told = _explain(lookup, history, evicted_at)
    return told if is_private else told.blurred()


def _explain(lookup: Lookup, history: LookupHistory, evicted_at: float | None) -> CacheExplanation:
    found, size = lookup.found.total, lookup.block_size
    told = CacheExplanation(
        num_tokens=lookup.num_known,
        found=lookup.found,
        worker_id=lookup.worker_id,
        reason=MissReason.UNKNOWN,
        position=found,
    )
    end = (found // size + 1) * size
    if lookup.is_bypassed:
        return replace(told, reason=MissReason.BYPASSED)
    if end >= lookup.num_known:
        return replace(told, reason=MissReason.SHORT)
    if not lookup.shares:
        return replace(told, reason=MissReason.OFF)
    if evicted_at is not None:
        return replace(told, reason=MissReason.EVICTED, evicted_s=lookup.at - evicted_at)
    return _compare(lookup, history.before(lookup), told, end)


def _compare(lookup: Lookup, earlier: list[Lookup], told: CacheExplanation, end: int) -> CacheExplanation:
    """Compares a lookup's tokens with those before it; `end` is where the first block ends that was not found."""
    own, key = lookup.request.prompt_token_ids + lookup.output, lookup.request.cache_key
    same = [each for each in earlier if _share(key, each.request.cache_key)]
    length, known = _longest(own, same)
    if known is not None and length >= end:
        here = [each for each in same if each.replica_id == lookup.replica_id]
        if _longest(own, here)[0] >= end:
            return replace(told, reason=MissReason.NOT_KEPT)
        return replace(told, reason=MissReason.OTHER_WORKER, elsewhere=known.worker_id)
    if end > key.salted_from:
        others = [each for each in earlier if each.request.cache_key.salt != key.salt]
        if _longest(own, others)[0] >= end:
            return replace(told, reason=MissReason.OTHER_SALT)
    if known is None or length < told.position:
        return told
    text = _computed(known)
    if length == len(text):
        return replace(told, reason=MissReason.ENDS, position=length)
    return replace(told, reason=MissReason.DIFFERS, position=length, token=own[length], other_token=text[length])


def _share(one: CacheKey, other: CacheKey) -> bool:
    """Tells whether equal tokens make equal blocks, of the same adapter: a salt counts from a pinned prefix on."""
    return one.salt == other.salt and (not one.salt or one.salted_from == other.salted_from)


def _computed(lookup: Lookup) -> list[int]:
    """Returns the tokens of a request that are computed by now, or soon: the last of its answer is not."""
    return lookup.request.prompt_token_ids + lookup.output[:-1]


def _longest(own: list[int], lookups: Iterable[Lookup]) -> tuple[int, Lookup | None]:
    """Returns how much of `own` the longest equal beginning has, and whose it is: the latest one's, None if nothing is
    equal."""
    length, longest = 0, None
    for each in lookups:
        # Most are no longer than the longest so far, which a look at that much of the prompt tells.
        prompt = each.request.prompt_token_ids
        if prompt[: length + 1] == own[: min(length + 1, len(prompt))]:
            common = _num_common(own, _computed(each))
            if common > length:
                length, longest = common, each
    return length, longest


def _num_common(one: list[int], other: list[int]) -> int:
    """Counts the tokens with which both begin."""
    limit = min(len(one), len(other))
    start = next((i for i in range(0, limit, _CHUNK) if one[i : i + _CHUNK] != other[i : i + _CHUNK]), limit)
    return next((i for i in range(start, limit) if one[i] != other[i]), limit)
