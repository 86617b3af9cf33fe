"""A frontend as the scheduler sees it: it has so many requests under way, always, and reads no token."""

from dataclasses import dataclass
from random import Random
from typing import Final

import zmq

from octavo.bench.cell.peer import Peer
from octavo.bench.parts.scheduler_alone import VOCAB_SIZE, make_request
from octavo.wire.base import SCHEMA_VERSION, Message
from octavo.wire.codec import decode_to_frontend
from octavo.wire.requests import (
    Deltas,
    FrontendHello,
    FrontendWelcome,
    Lease,
    Refused,
    Rejected,
    Renew,
    Submit,
    Unregistered,
)
from octavo.wire.sampling import SamplingParams

# How a message of deltas begins, and what is in it where a sequence ends: all others need not be decoded.
_DELTAS: Final = b"\x93\xa6Deltas"
_ENDS: Final = b"\xa6length"


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and the fewest and the most of an answer."""

    prompt: int = 256
    shortest: int = 128
    longest: int = 384


class FakeFrontend(Peer):
    """Keeps `live` requests under way once it is welcome: for each that ends it submits another."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, number: int, live: int, lengths: Lengths
    ) -> None:
        super().__init__(context, endpoint)
        self.messages = self.message_bytes = self.ended = 0
        self._id, self._random = number + 1, Random(-1 - number)
        self._num_live, self._lengths = live, lengths
        self._live: set[str] = set()
        self._submitted = 0

    def beat(self) -> None:
        """Says hello, or renews its lease."""
        if self.epoch is None:
            self.call(FrontendHello(SCHEMA_VERSION, self._id))
        else:
            self.send(Renew(self.epoch, [Lease(request_id, 1) for request_id in self._live]))

    def fill(self) -> None:
        """Submits what is missing."""
        while len(self._live) < self._num_live:
            self._submit()

    def drain(self) -> None:
        """Takes in all that has come. Raises `RuntimeError` if the scheduler will not do as it is asked."""
        while frame := self.receive():
            if frame.startswith(_DELTAS):
                self.messages += 1
                self.message_bytes += len(frame)
                if _ENDS not in frame:
                    continue
            self._take(decode_to_frontend(frame))

    def new_tally(self) -> None:
        self.messages = self.message_bytes = self.ended = 0

    def _take(self, message: Message) -> None:
        match message:
            case Deltas(_, deltas):
                for request_id in (delta.request_id for delta in deltas if delta.finish_reason):
                    self._live.remove(request_id)
                    self.ended += 1
                    self._submit()
            case FrontendWelcome(epoch):
                self.epoch = epoch
            case Rejected() | Refused() | Unregistered():
                raise RuntimeError(f"frontend {self._id} is not served: {message}")

    def _submit(self) -> None:
        assert self.epoch is not None
        self._submitted += 1
        request_id = f"chatcmpl-{self._id:08x}{self._submitted:024x}"
        prompt = self._random.choices(range(VOCAB_SIZE), k=self._lengths.prompt)
        max_tokens = self._random.randint(self._lengths.shortest, self._lengths.longest)
        self.send(Submit(self.epoch, make_request(request_id, prompt, SamplingParams(max_tokens=max_tokens))))
        self._live.add(request_id)
