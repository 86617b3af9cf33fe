"""Payloads that are refused for a while, for workers have died over them."""

import hashlib
import math

import msgspec

from octavo.wire.requests import Request

# Beyond this the oldest are let go.
MAX_PAYLOADS = 4096


class Quarantine:
    """Payloads, by hash, for `seconds` each: under whatever id and for whatever frontend they come again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Until when; in the order of their coming, which is that of their going.
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        """Refuses what is asked there from now on."""
        payload = _payload(request)
        self._until.pop(payload, None)
        self._until[payload] = now + self._seconds
        if len(self._until) > MAX_PAYLOADS:
            del self._until[next(iter(self._until))]

    def refusal(self, request: Request, now: float) -> str | None:
        """Why the request is not taken, if it is not."""
        self._release(now)
        # Hashing takes time, and there is hardly ever a reason.
        until = self._until.get(_payload(request)) if self._until else None
        if until is None:
            return None
        return (
            "workers have died over the same prompt with the same parameters, at last over nothing else;"
            f" it is refused for another {math.ceil(until - now)} s"
        )

    def _release(self, now: float) -> None:
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]


def _payload(request: Request) -> bytes:
    """A hash of what is computed, but for the seed: every submission may draw another."""
    content = request.prompt_token_ids, msgspec.structs.replace(request.sampling, seed=0), request.cache_key.adapter
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()
