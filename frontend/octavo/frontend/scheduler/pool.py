"""Presents several schedulers, each with workers of its own (a cell), as one to the rest of the frontend.

A new request goes to the cell that `PrefixRouter` chooses, and to the next one if that cell has no place for it.
Requests of a cell that cannot run them are handed over to another: they are submitted there from their journals, so
that their streams go on with the same tokens. What the former cell still holds of them ends with their leases.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple

import msgspec

from octavo.frontend.errors import Reason, Unavailable
from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerClient, SchedulerRefused, run_together
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.pinned_prefixes import NamedPrefixes
from octavo.frontend.scheduler.prefix_router import CellLoad, PrefixRouter
from octavo.frontend.scheduler.session import LiveRequest
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.wire.requests import RejectReason, ServiceStatus

_log = logging.getLogger(__name__)

# How long a stream that has begun waits for its own cell, where most of it is computed. Other streams do not wait.
_HANDOVER_S: Final = 3.0
# Seconds until a cell of another version is tried again; its scheduler may have been replaced.
_REFUSED_S: Final = 5.0
_HOLDING_S: Final = 0.5
# The availability of all cells together is the best that any cell has.
_BEST_FIRST: Final = (
    SchedulerAvailability.READY,
    SchedulerAvailability.STALLED,
    SchedulerAvailability.NO_WORKER,
    SchedulerAvailability.NO_SCHEDULER,
    SchedulerAvailability.MODEL_MISMATCH,
)


class Listing(NamedTuple):
    """Names a request as a scheduler lists it. `request_id` is unique among the requests of one `frontend_id`."""

    frontend_id: str
    request_id: str


class CacheResets(NamedTuple):
    """Counts what resets of prefix caches have let go: cached blocks, those of them in use, and pinned prefixes that
    are computed anew, once for each cell."""

    num_blocks: int
    num_in_use: int
    num_prefixes: int


class SchedulerPool:
    """Links one frontend to all its schedulers. `run()` must be running; all methods belong to its event loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        model_fingerprint: str,
        grace_s: float,
        own_prefixes: Mapping[str, list[int]] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self.model_fingerprint = model_fingerprint
        self.grace_s = grace_s
        attempts = count(1)
        self.links = [
            SchedulerClient(
                endpoint, model_fingerprint, grace_s, own_prefixes, keys, attempts, self._look, self._take_rejected
            )
            for endpoint in endpoints
        ]
        # Requests that were handed over to another cell.
        self.handovers = 0
        self._router = PrefixRouter(len(self.links), first=secrets.randbelow(len(self.links)))
        self._home: dict[LiveRequest, SchedulerClient] = {}
        # The links whose queues had no place for a request.
        self._full: dict[LiveRequest, set[SchedulerClient]] = {}
        # The latest epoch of each link, and the availability that was logged of the cell.
        self._epochs: dict[SchedulerClient, int] = {}
        self._said: dict[SchedulerClient, SchedulerAvailability] = {}
        self._refused: set[SchedulerClient] = set()
        self._changed = asyncio.Event()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def availability(self) -> SchedulerAvailability:
        """Tells whether a request could run now in any cell, or what is missing."""
        if len(self.links) == 1:
            return self.links[0].availability
        found = {link.availability for link in self.links}
        return next(availability for availability in _BEST_FIRST if availability in found)

    @property
    def status(self) -> ServiceStatus | None:
        """Returns the status of all cells with the best availability together; None before a first message."""
        # Each request asks several times.
        if len(self.links) == 1:
            return self.links[0].status
        best = self.availability
        statuses = [link.status for link in self.links if link.status and link.availability is best]
        return _merged(statuses or [link.status for link in self.links if link.status])

    @property
    def prefixes(self) -> NamedPrefixes:
        """Returns the pinned prefixes that requests may name, in whatever cell they are."""
        known: dict[str, list[int]] = {}
        for link in reversed(self.links):
            known |= link.prefixes.known
        there = [link for link in self.links if link.availability is not SchedulerAvailability.NO_SCHEDULER]
        return NamedPrefixes(known, bool(there) and all(link.prefixes.reported for link in there))

    @property
    def journals(self) -> list[Journal]:
        """Returns the journals of all requests that schedulers hold."""
        return [request.journal for link in self.links for request in link.live]

    def away_s(self) -> float:
        """Returns the seconds since a scheduler with this frontend's model last sent a message, or since the start."""
        fit = [link for link in self.links if link.availability is not SchedulerAvailability.MODEL_MISMATCH]
        return min(link.away_s() for link in fit or self.links)

    async def changed(self) -> None:
        """Returns after the next news of a scheduler, when `availability` or what is pinned may have changed."""
        await self._changed.wait()

    def ask_prefixes(self) -> None:
        """Asks every scheduler what is pinned; until all at hand have answered, `prefixes.reported` is False."""
        for link in self.links:
            link.ask_prefixes()

    @property
    def frontend_ids(self) -> list[str]:
        """Returns the name of each link's registration, as the schedulers list it."""
        return [link.frontend_id for link in self.links]

    async def reset_prefix_caches(self, salt: str | None, timeout_s: float) -> CacheResets:
        """Has the schedulers of all cells with this frontend's model reset their prefix caches, whole (None) or what is
        behind `salt`; returns what they have let go.

        Raises `Unavailable` if one does not answer in time; others may have done it then.
        """
        fit = [link for link in self.links if link.availability is not SchedulerAvailability.MODEL_MISMATCH]
        asked = [(link.cache_resets, link.ask_cache_reset(salt)) for link in fit]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while any(answers[serial] is None for answers, serial in asked):
                        await self.changed()
        finally:
            found = [answers.pop(serial) for answers, serial in asked]
        done = [answer for answer in found if answer is not None]
        if not fit or len(done) < len(fit):
            raise Unavailable(
                Reason.SCHEDULER_UNREACHABLE,
                f"{len(done)} of {len(self.links)} schedulers have reset their prefix caches, the others have not"
                " answered; ask again",
            )
        return CacheResets(
            sum(answer.num_blocks for answer in done),
            sum(answer.num_in_use for answer in done),
            sum(answer.num_prefixes for answer in done),
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: LiveRequest) -> None:
        """Sends a request to a cell. Raises `Overloaded` for more requests than one renewal can name."""
        # Where no cell can take the request, the first one says why.
        self._place(request, self._choose(request.journal, lambda _: True) or self.links[0])

    def listing(self, request: LiveRequest) -> Listing | None:
        """Returns the name under which a scheduler lists the request; None for a request that none holds."""
        link = self._home.get(request)
        return None if link is None else Listing(link.frontend_id, request.journal.wire_id)

    def end_sequence(self, request: LiveRequest, sequence_index: int) -> None:
        """Ends one sequence of a request whose others may run on, unless the request was released."""
        if (link := self._home.get(request)) is not None:
            link.end_sequence(request, sequence_index)

    def release(self, request: LiveRequest) -> None:
        """Ends a request, whatever its state; must be called for every submitted one. Idempotent."""
        if (link := self._home.pop(request, None)) is not None:
            link.release(request)
            self._full.pop(request, None)

    def _place(self, request: LiveRequest, link: SchedulerClient) -> None:
        link.submit(request)
        self._home[request] = link

    def _take_rejected(self, link: SchedulerClient, request: LiveRequest, reason: RejectReason) -> bool:
        """Sends a request that one cell has no place for to another; returns whether another took it."""
        if reason is not RejectReason.QUEUE_FULL:
            return False
        full = self._full.setdefault(request, set())
        full.add(link)
        other = self._choose(
            request.journal, lambda other: other not in full and other.availability is SchedulerAvailability.READY
        )
        if other is None:
            return False
        request.journal.turned_away()
        self._place(request, other)
        return True

    def _choose(self, journal: Journal, may: Callable[[SchedulerClient], bool]) -> SchedulerClient | None:
        """Returns the link to the cell for a request, among links for which `may` is true; None if there is none."""
        if len(self.links) == 1:
            return self.links[0] if may(self.links[0]) else None
        loads = [link.load if may(link) else None for link in self.links]
        loads = self._narrowed(loads, lambda link: _has_room(link.status, journal))
        pinned = journal.prompt_token_ids[: journal.cache_key.salted_from]
        if pinned:
            loads = self._narrowed(loads, lambda link: link.prefixes.has(pinned))
        chosen = self._router.choose(journal.prompt_token_ids, journal.cache_key, loads)
        return None if chosen is None else self.links[chosen]

    def _narrowed(
        self, loads: list[CellLoad | None], suits: Callable[[SchedulerClient], bool]
    ) -> list[CellLoad | None]:
        """Returns `loads` with None for links that `suits` refuses, or unchanged if it refuses all."""
        suiting = [load if load and suits(link) else None for link, load in zip(self.links, loads, strict=True)]
        return suiting if any(suiting) else loads

    # -- cells that come and go -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps all conversations going until cancelled.

        Raises `SchedulerRefused` once every scheduler has refused this frontend, and no request is left for which a
        scheduler of the same schema may still come back in time.
        """
        await run_together(*map(self._keep, self.links))

    async def _keep(self, link: SchedulerClient) -> None:
        while True:
            try:
                await link.run()
            except SchedulerRefused as refusal:
                self._refused.add(link)
                self._look(link)
                if len(self._refused) == len(self.links) and not any(each.holds for each in self.links):
                    for each in self.links:
                        each.fail_all()
                    raise
                _log.error("the cell at %s gets no requests: %s", link.endpoint, refusal)
                # Requests that wait for a scheduler of their schema are asked for often, and not beyond their grace.
                await asyncio.sleep(_HOLDING_S if link.holds else _REFUSED_S)

    def _look(self, link: SchedulerClient) -> None:
        """Follows the state of `link` after news of it: logs changes, and hands requests over."""
        if link.epoch is not None:
            self._registered(link, link.epoch)
        availability = link.availability
        if availability is not self._said.get(link):
            self._said[link] = availability
            self._say(link, availability)
        if availability is not SchedulerAvailability.READY and len(self.links) > 1:
            self._hand_over(link, availability)
        self._changed.set()
        self._changed = asyncio.Event()

    def _registered(self, link: SchedulerClient, epoch: int) -> None:
        self._refused.discard(link)
        if self._epochs.setdefault(link, epoch) != epoch:
            # When a scheduler begins anew, its workers do too.
            self._epochs[link] = epoch
            self._router.lost(self.links.index(link))

    def _say(self, link: SchedulerClient, availability: SchedulerAvailability) -> None:
        if availability is SchedulerAvailability.MODEL_MISMATCH:
            _log.warning(
                "the cell at %s gets no requests: its workers serve another model than this frontend; start both with"
                " the same model directory",
                link.endpoint,
            )
        elif len(self.links) > 1:
            _log.info("the cell at %s: %s", link.endpoint, availability.name)

    def _hand_over(self, link: SchedulerClient, availability: SchedulerAvailability) -> None:
        """Hands requests that a cell cannot run now to other cells, unless waiting is better."""
        gone = availability is SchedulerAvailability.MODEL_MISMATCH or link.unready_s() > _HANDOVER_S
        for request in link.live:
            may_wait = not gone and request.journal.first_token_at is not None
            if may_wait or request.journal.complete or request.failure:
                continue
            other = self._choose(request.journal, lambda other: other.availability is SchedulerAvailability.READY)
            if other is None:
                return
            link.release(request)
            self._place(request, other)
            self.handovers += 1


def _has_room(status: ServiceStatus | None, journal: Journal) -> bool:
    """Tells whether the cell could hold the longest of the request's sequences, as far as is known."""
    if status is None or status.model is None:
        return True
    longest = len(journal.prompt_token_ids) + journal.sampling.max_tokens
    return longest <= min(status.capacity_tokens, status.model.max_model_len)


def _merged(statuses: Iterable[ServiceStatus]) -> ServiceStatus | None:
    """Returns one status with the replicas and the work of all, and the capacity of the largest; None for none."""
    by_size = sorted(statuses, key=lambda status: status.capacity_tokens)
    if not by_size:
        return None
    return msgspec.structs.replace(
        by_size[-1],
        replicas=sum(status.replicas for status in by_size),
        work_tokens=sum(status.work_tokens for status in by_size),
    )
