"""The frontends that are registered: their leases, and the requests they submit, renew and end."""

from octavo.scheduler.core.admission import Refusal, refuse_malformed, refuse_misfit
from octavo.scheduler.core.events import FrontendLost
from octavo.scheduler.core.sequence import RequestGroup, Sequence, SequenceStatus
from octavo.scheduler.core.state import SchedulerState
from octavo.wire.requests import (
    LOAD_INTERVAL_S,
    FinishReason,
    FrontendWelcome,
    Lease,
    PrefixesChanged,
    RejectReason,
    Renewed,
    Request,
    ServiceLoad,
)


class FrontendLeases:
    """Holds each registered frontend to its lease: requests that it does not renew in time end."""

    def __init__(self, state: SchedulerState) -> None:
        self._renewed_at: dict[int, float] = {}
        # The load that all frontends were told last besides their renewals, and when.
        self._load_told = ServiceLoad(0, 0, [])
        self._load_told_at = float("-inf")
        self._next_serial = 1
        self._state = state

    def __len__(self) -> int:
        return len(self._renewed_at)

    # -- leases -----------------------------------------------------------------------------------------------------

    def join(self, frontend_id: int, now: float) -> None:
        """Registers a frontend that said hello, for the first time or again."""
        self._state.requests.held.setdefault(frontend_id, {})
        self._renewed_at[frontend_id] = now
        self._state.outbox.to_frontend(
            frontend_id, FrontendWelcome(self._state.epoch, self._state.replica_table.status())
        )
        self.send_prefixes(frontend_id)

    def send_prefixes(self, frontend_id: int) -> None:
        """Sends a frontend the list of pinned prefixes."""
        self._state.outbox.to_frontend(frontend_id, PrefixesChanged(self._state.epoch, self._state.prefixes.all))

    def send_all_prefixes(self) -> None:
        """Sends every frontend the list of pinned prefixes, and the status, as pins take room."""
        for frontend_id in self._renewed_at:
            self.send_prefixes(frontend_id)
        self._state.send_status()

    def renew(self, frontend_id: int, live: list[Lease], now: float) -> None:
        """Takes the list of all live requests of a frontend: others end, and it learns which are not held."""
        self._renewed_at[frontend_id] = now
        held = self._state.requests.held[frontend_id]
        named = {lease.request_id: lease.attempt for lease in live}
        for group in list(held.values()):
            if named.get(group.request.request_id) != group.request.attempt:
                self._state.requests.abandon(group)
        unknown = [lease for lease in live if lease.request_id not in held]
        self._state.requests.work_tokens[frontend_id] = sum(group.work_tokens for group in held.values())
        self._state.outbox.to_frontend(
            frontend_id, Renewed(self._state.epoch, unknown, self._state.replica_table.status())
        )

    def tell_load(self, now: float) -> None:
        """Sends every frontend the status if the load has changed, so that what they say of it is never old."""
        if now - self._load_told_at < LOAD_INTERVAL_S:
            return
        load = self._state.replica_table.load()
        if load != self._load_told:
            self._load_told, self._load_told_at = load, now
            self._state.send_status()

    def lose_overdue(self, now: float) -> None:
        """Forgets frontends whose leases have run out."""
        for frontend_id, renewed_at in list(self._renewed_at.items()):
            if now - renewed_at > self._state.config.lease_s:
                self.lose(frontend_id)

    def lose(self, frontend_id: int) -> None:
        """Ends all requests that are held for a frontend, and forgets it."""
        for group in list(self._state.requests.held[frontend_id].values()):
            self._state.requests.abandon(group)
        del self._state.requests.held[frontend_id], self._renewed_at[frontend_id]
        self._state.requests.work_tokens.pop(frontend_id, None)
        self._state.outbox.add(FrontendLost(frontend_id))

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, frontend_id: int, request: Request, now: float) -> None:
        """Takes in a request, in place of an earlier attempt if one is held; or refuses it."""
        held = self._state.requests.held[frontend_id].get(request.request_id)
        if held and held.request.attempt >= request.attempt:
            # A frontend counts its submissions: the same came twice, or an older one late.
            self._state.observer.ended(request.traceparent)
            return
        if held:
            self._state.requests.drop(held)
        if refusal := self._refusal(request, now):
            self._state.requests.refuse(frontend_id, request, *refusal)
        else:
            self._state.requests.enter(frontend_id, self._new_group(request, frontend_id, now))

    def _refusal(self, request: Request, now: float) -> Refusal | None:
        if refusal := refuse_malformed(request, self._state.config.max_parallel):
            return refusal
        if detail := self._state.quarantine.refusal(request, now):
            return RejectReason.QUARANTINED, detail
        num_waiting, model = len(self._state.requests.waiting), self._state.replica_table.model
        if num_waiting >= self._state.config.max_waiting and not request.resubmitted:
            return RejectReason.QUEUE_FULL, f"{num_waiting} requests are waiting"
        if model is None:
            return None
        return refuse_misfit(request, model, self._state.replicas, was_accepted=request.resubmitted)

    def _new_group(self, request: Request, frontend_id: int, now: float) -> RequestGroup:
        arrival = now - request.age_ms / 1000.0
        order = (arrival - request.priority * self._state.config.priority_ageing_s, self._next_serial)
        self._next_serial += 1
        return RequestGroup(request, arrival, order, frontend_id=frontend_id)

    def abort(self, frontend_id: int, request_ids: list[str]) -> None:
        """Ends requests that a frontend no longer wants; unknown ones are ignored."""
        held = self._state.requests.held[frontend_id]
        for request_id in request_ids:
            if group := held.get(request_id):
                self._state.requests.abandon(group)

    def end_sequence(self, frontend_id: int, request_id: str, attempt: int, sequence_index: int) -> None:
        """Ends one sequence, whose end its frontend has found; with the last that is wanted the whole request ends."""
        group = self._state.requests.held[frontend_id].get(request_id)
        if group is None or group.request.attempt != attempt or group.search is not None:
            return
        wanted = [sequence for sequence in group.live if not sequence.is_unwanted]
        ended = [sequence for sequence in wanted if sequence.index == sequence_index]
        if ended:
            self._state.observer.finished(FinishReason.STOP)
        if wanted == ended:
            self._state.requests.drop(group)
        elif ended:
            self._end_one(group, ended[0])

    def _end_one(self, group: RequestGroup, sequence: Sequence) -> None:
        replica = self._state.requests.replica_of(group)
        if replica is None:
            sequence.leave(SequenceStatus.FINISHED)
        elif group.needs(sequence):
            sequence.is_unwanted = True
        else:
            replica.finish(group, sequence)
