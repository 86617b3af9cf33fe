"""Payloads that are refused for a while, for workers have died over them."""

import hashlib
import math
from dataclasses import dataclass

import msgspec

from octavo.wire.requests import Request

# Beyond this the oldest are let go.
MAX_PAYLOADS = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """A payload by its hash in hexadecimal, the request that asked for it, the length of its prompt, until when it is
    refused, and why."""

    payload: str
    request_id: str
    num_prompt_tokens: int
    until: float
    why: str


class Quarantine:
    """Payloads, by hash, for `seconds` each: under whatever id and for whatever frontend they come again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # In the order of their coming, which is that of their going.
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self, now: float) -> list[Entry]:
        """What is refused now, the oldest first."""
        self._release(now)
        return list(self._entries.values())

    def add(self, request: Request, now: float, why: str) -> None:
        """Refuses what is asked there from now on."""
        payload = _payload(request)
        self._entries.pop(payload, None)
        entry = Entry(payload.hex(), request.request_id, len(request.prompt_token_ids), now + self._seconds, why)
        self._entries[payload] = entry
        if len(self._entries) > MAX_PAYLOADS:
            del self._entries[next(iter(self._entries))]

    def clear(self, payload: str | None) -> None:
        """Takes again what has this name, or all. What is not there is cleared already."""
        self._entries = {key: entry for key, entry in self._entries.items() if payload not in (None, entry.payload)}

    def refusal(self, request: Request, now: float) -> str | None:
        """Why the request is not taken, if it is not."""
        self._release(now)
        # Hashing takes time, and there is hardly ever a reason.
        entry = self._entries.get(_payload(request)) if self._entries else None
        if entry is None:
            return None
        return (
            "workers have died over the same prompt with the same parameters, at last over nothing else;"
            f" it is refused for another {math.ceil(entry.until - now)} s, unless an operator clears {entry.payload}"
        )

    def _release(self, now: float) -> None:
        while self._entries and self._entries[oldest := next(iter(self._entries))].until <= now:
            del self._entries[oldest]


def _payload(request: Request) -> bytes:
    """A hash of what is computed, but for the seed: every submission may draw another."""
    content = request.prompt_token_ids, msgspec.structs.replace(request.sampling, seed=0), request.cache_key.adapter
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()
