"""Holds the conversation with one scheduler without its socket: takes messages, returns messages, updates journals.

A frontend says hello until it is welcomed, submits requests, and renews all of them every second; from the answer to
a renewal it learns what it must submit again. That one path carries running streams over a lost message, a
reconnection and a new scheduler.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from typing import Final, Protocol

from octavo.frontend.errors import REJECTIONS, TERMS, Broken, Reason, ServiceError
from octavo.frontend.request import events
from octavo.frontend.scheduler.journal import DeltaVerdict, Journal
from octavo.frontend.scheduler.pinned_prefixes import PinnedPrefixes
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.requests import (
    MAX_PREFIXES,
    Abort,
    Deltas,
    EndSequence,
    FromFrontend,
    FrontendHello,
    FrontendWelcome,
    Lease,
    Notices,
    PinPrefixes,
    PinRefused,
    PrefixCacheReset,
    PrefixesChanged,
    Refused,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    ResetPrefixCache,
    ServiceStatus,
    StatusChanged,
    Submit,
    ToFrontend,
    Unregistered,
)


class CellWork:
    """Estimates the tokens that a cell has to compute.

    The estimate is the scheduler's latest count, moved by what this frontend has sent and ended since.
    """

    def __init__(self) -> None:
        # This frontend's share, by the requests' ids on the wire.
        self._own: dict[str, int] = {}
        self._num_own = 0
        self._num_others = 0

    @property
    def tokens(self) -> int:
        """Returns the tokens of all frontends' requests."""
        return self._num_own + self._num_others

    def add(self, journal: Journal) -> None:
        """Adds the work of a request that was sent."""
        self._own[journal.wire_id] = tokens = journal.work_tokens
        self._num_own += tokens

    def drop(self, journal: Journal) -> None:
        """Takes off the work of a request that the scheduler holds no more."""
        self._num_own -= self._own.pop(journal.wire_id, 0)

    def reported(self, work_tokens: int, own: Iterable[Journal]) -> None:
        """Takes the scheduler's count of all frontends; `own` are the journals of this frontend's requests there."""
        self._own = {journal.wire_id: journal.work_tokens for journal in own}
        self._num_own = sum(self._own.values())
        self._num_others = max(0, work_tokens - self._num_own)


# What only a frontend knows to add to the scheduler's words.
_ADVICE: Final = {
    RejectReason.MODEL_MISMATCH: (
        ", not this frontend's model; start them and this frontend with the same model directory"
    ),
    RejectReason.QUEUE_FULL: ", as many as the queue takes; try again later",
}


def rejection(message: Rejected) -> ServiceError:
    """Returns the client's error for a request that the scheduler will not, or can no longer, run."""
    detail = message.detail or f"the scheduler rejected the request: {message.reason.value}"
    reason = REJECTIONS.get(message.reason) or Reason[message.reason.name]
    return TERMS[reason].kind(reason, detail + _ADVICE.get(message.reason, ""))


_log = logging.getLogger(__name__)

# After this many renewals without a word of the scheduler the registration is taken for lost, and the frontend says
# hello again. Any word counts: where tokens come faster than they are read, the answer is behind them.
_MAX_UNANSWERED_RENEWALS = 3


class LiveRequest(Protocol):
    """Describes a submitted request: its journal, and how its reader hears of news. Compared by identity."""

    @property
    def journal(self) -> Journal:
        """Returns the journal."""
        ...

    @property
    def failure(self) -> ServiceError | None:
        """Returns the error that ended the request, if any."""
        ...

    def notify(self) -> None:
        """Wakes the reader, for the journal has grown."""
        ...

    def tell(self, notice: events.RequestNotice) -> None:
        """Keeps a notice for the reader, and wakes the reader."""
        ...

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for its reader; the first failure stays."""
        ...


HandOver = Callable[[LiveRequest, RejectReason], bool]
_Current = StatusChanged | Renewed | Deltas | Notices | Rejected | PrefixesChanged | PinRefused | PrefixCacheReset


class SchedulerSession:
    """Holds the state of one frontend's registration. `now` is seconds of one monotonic clock.

    `own_prefixes` are the token ids, by name, of prefixes that this frontend wants pinned. `attempts` yields the rising
    numbers of submissions; sessions between which requests move share one. `hand_over` is called with a rejected
    request, and returns whether another cell took the request.
    """

    def __init__(
        self,
        frontend_id: int,
        model_fingerprint: str,
        now: float,
        own_prefixes: Mapping[str, list[int]] | None = None,
        attempts: Iterator[int] | None = None,
        hand_over: HandOver = lambda request, reason: False,
    ) -> None:
        self.frontend_id = frontend_id
        self.model_fingerprint = model_fingerprint
        self.epoch: int | None = None
        self.status: ServiceStatus | None = None
        # When the status came.
        self.status_at = float("-inf")
        self.refused: str | None = None
        self.last_heard = now
        # By their ids on the wire.
        self.live: dict[str, LiveRequest] = {}
        self.prefixes = PinnedPrefixes(own_prefixes or {})
        # The answers to those that somebody waits for, by their serial; None: it has not come.
        self.cache_resets: dict[int, PrefixCacheReset | None] = {}
        self._num_resets = 0
        self._unanswered_renewals = 0
        # Hellos of this registration, and how many of them were answered; the list of prefixes follows each answer.
        self._num_hellos = self._num_welcomes = 0
        # One count for all requests: an id may be used again, and answers to its former request may still be under way.
        self._attempts = attempts or count(1)
        self._hand_over = hand_over
        self._work = CellWork()

    @property
    def work_tokens(self) -> int:
        """Returns the tokens that the scheduler's workers are still to compute, of all frontends' requests."""
        return self._work.tokens

    def hello(self) -> FrontendHello:
        """Returns the first message on a connection, which is repeated until there is an answer."""
        self._num_hellos += 1
        return FrontendHello(schema_version=SCHEMA_VERSION, frontend_id=self.frontend_id)

    def ask_prefixes(self) -> list[FromFrontend]:
        """Returns a message that asks anew what is pinned, if this frontend is registered; `prefixes.reported` is False
        until all that was asked is answered."""
        if self.epoch is None:
            return []
        self.prefixes.reported = False
        return [self.hello()]

    def reset_prefix_cache(self, salt: str | None) -> tuple[int, list[FromFrontend]]:
        """Returns the serial under which `cache_resets` holds the answer, until who asked takes it out; and the message
        that asks for a reset: none if this frontend is not registered."""
        self._num_resets += 1
        self.cache_resets[self._num_resets] = None
        if self.epoch is None:
            return self._num_resets, []
        return self._num_resets, [ResetPrefixCache(self.epoch, self._num_resets, salt)]

    def submit(self, request: LiveRequest, now: float) -> list[FromFrontend]:
        """Takes the request under a lease; returns its submission. A renewal finds out submissions that were lost."""
        request.journal.wire_id = self._wire_id(request.journal.request_id)
        self.live[request.journal.wire_id] = request
        self._work.add(request.journal)
        return self._submission(request.journal, now)

    def release(self, request: LiveRequest) -> list[FromFrontend]:
        """Ends the lease; returns an abort if the scheduler may still work for the request."""
        journal = request.journal
        if self.live.get(journal.wire_id) is not request:
            # It was rejected.
            return []
        del self.live[journal.wire_id]
        self._work.drop(journal)
        if self.epoch is None or journal.complete:
            return []
        return [Abort(epoch=self.epoch, request_ids=[journal.wire_id])]

    def end_sequence(self, request: LiveRequest, sequence_index: int) -> list[FromFrontend]:
        """Ends one sequence; returns a message if others run on. The last one ends with the request, by `release`."""
        journal = request.journal
        if not journal.end_sequence(sequence_index) or self.epoch is None:
            return []
        return [EndSequence(self.epoch, journal.wire_id, journal.attempt, sequence_index)]

    def tick(self) -> list[FromFrontend]:
        """Returns what is sent once a second: the renewal of every lease; hello, until the scheduler answers it."""
        if self._unanswered_renewals >= _MAX_UNANSWERED_RENEWALS:
            self.disconnected()
        renewal = self._renewal()
        if renewal and self._num_welcomes >= self._num_hellos:
            return renewal
        # What has no answer by now may be lost.
        self._num_welcomes = self._num_hellos
        return [*renewal, self.hello()]

    def disconnected(self) -> None:
        """Drops the registration: hello, welcome and a renewal must come before all else."""
        self.epoch = None
        self._unanswered_renewals = self._num_hellos = self._num_welcomes = 0

    def receive(self, message: ToFrontend, now: float) -> list[FromFrontend]:
        """Takes one message; returns the messages that answer it."""
        match message:
            case FrontendWelcome():
                return self._welcomed(message, now)
            case Refused():
                self.refused = message.detail
                return []
            case Unregistered():
                self.disconnected()
                return [self.hello()]
        if message.epoch != self.epoch:
            return []
        self.last_heard, self._unanswered_renewals = now, 0
        return self._receive_current(message, now)

    def _receive_current(self, message: _Current, now: float) -> list[FromFrontend]:
        match message:
            case Deltas():
                return self._accept(message, now)
            case Renewed():
                self._take_status(message.status, now)
                self._work.reported(message.status.work_tokens, [request.journal for request in self.live.values()])
                return self._resubmit_unknown(message, now)
            case StatusChanged():
                self._take_status(message.status, now)
            case Rejected():
                self._reject(message)
            case Notices():
                self._pass_on(message)
            case PrefixesChanged():
                self.prefixes.changed(message.prefixes, latest=self._num_welcomes >= self._num_hellos)
            case PrefixCacheReset():
                if message.serial in self.cache_resets:
                    self.cache_resets[message.serial] = message
            case PinRefused():
                self.prefixes.refused(message.name)
                _log.warning("the prefix %r is not pinned: %s", message.name, message.detail)
        return []

    def _welcomed(self, message: FrontendWelcome, now: float) -> list[FromFrontend]:
        self.last_heard = now
        self._take_status(message.status, now)
        # A hello that was taken for lost may be answered too.
        self._num_welcomes = min(self._num_welcomes + 1, self._num_hellos)
        if message.epoch == self.epoch:
            # The answer to a hello that was repeated before its first answer, or that asked what is pinned.
            return []
        self.epoch, self._unanswered_renewals = message.epoch, 0
        return self._pins(message.epoch) + self._renewal()

    def _take_status(self, status: ServiceStatus, now: float) -> None:
        self.status, self.status_at = status, now

    def _pins(self, epoch: int) -> list[FromFrontend]:
        """Returns the prefixes to pin, which go out before the requests come back and look for them."""
        prefixes = self.prefixes.welcomed(epoch)
        return [PinPrefixes(epoch, prefixes[i : i + MAX_PREFIXES]) for i in range(0, len(prefixes), MAX_PREFIXES)]

    def _renewal(self) -> list[FromFrontend]:
        if self.epoch is None:
            return []
        leases = [request.journal.lease() for request in self.live.values() if not request.journal.complete]
        self._unanswered_renewals += 1
        return [Renew(epoch=self.epoch, live=leases)]

    def _resubmit_unknown(self, message: Renewed, now: float) -> list[FromFrontend]:
        return [answer for lease in message.unknown for answer in self._resubmit_if_current(lease, now)]

    def _resubmit_if_current(self, lease: Lease, now: float) -> list[FromFrontend]:
        request = self.live.get(lease.request_id)
        # A request that was submitted again since is on its way.
        if request is None or request.journal.attempt != lease.attempt:
            return []
        return self._resubmission(request.journal, now)

    def _accept(self, message: Deltas, now: float) -> list[FromFrontend]:
        answers: list[FromFrontend] = []
        for delta in message.deltas:
            request = self.live.get(delta.request_id)
            if request is None or request.failure is not None:
                continue
            match request.journal.accept(delta, now):
                case DeltaVerdict.ACCEPTED:
                    request.notify()
                case DeltaVerdict.BROKEN:
                    answers += self._resubmission(request.journal, now)
                case DeltaVerdict.FAULTY:
                    request.fail(_lacking())
        return answers

    def _resubmission(self, journal: Journal, now: float) -> list[FromFrontend]:
        if journal.complete:
            return []
        return self._submission(journal, now)

    def _submission(self, journal: Journal, now: float) -> list[FromFrontend]:
        journal.start_attempt(next(self._attempts))
        if self.epoch is None:
            return []
        return [Submit(epoch=self.epoch, request=journal.submit(self.model_fingerprint, now))]

    def _wire_id(self, request_id: str) -> str:
        """Returns the request's own id, or another one if a request of another tenant has that id."""
        names = chain([request_id], (f"{request_id}#{number}" for number in count(2)))
        return next(name for name in names if name not in self.live)

    def _pass_on(self, message: Notices) -> None:
        for notice in message.notices:
            request = self.live.get(notice.request_id)
            if request is not None and request.journal.attempt == notice.attempt and not request.journal.complete:
                request.tell(events.RequestNotice(notice.kind, notice.queue_position))

    def _reject(self, message: Rejected) -> None:
        request = self.live.get(message.request_id)
        if request is not None and request.journal.attempt == message.attempt:
            # The scheduler does not hold it any more.
            del self.live[message.request_id]
            self._work.drop(request.journal)
            if not self._hand_over(request, message.reason):
                request.fail(rejection(message))


def _lacking() -> Broken:
    return Broken(
        Reason.STREAM_BROKEN,
        "the scheduler sent an answer without the logprobs, or the output, asked for; this is a fault of the server",
    )
