"""Judges what a scheduler owes to requests in every turn, from outside by plain rules that are not its own.

* All that lost their blocks come back to a replica in the order of their arrival, swapped or not.
* No replica idles while a request waits that it could hold, whoever else waits in front of that; but for one that is
  for what follows prompts, while another is there for those.
* A request that was accepted is told that it fits nowhere only if that is so, pinned prefixes counted as nothing
  wherever they can make way.
"""

from collections import Counter
from dataclasses import dataclass

from octavo.scheduler.core.events import Effect, SendToFrontend
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.wire.requests import Rejected, RejectReason, Request
from octavo.wire.steps import WorkerRole


def worst_case(request: Request, replica: Replica) -> int:
    """Blocks of the replica that the request takes when it has grown as far as it may, nothing shared."""
    hello, longest = replica.hello, len(request.prompt_token_ids) + request.sampling.max_tokens
    return request.sampling.parallel * _blocks(replica, longest) * len(hello.kv_groups)


def pinned(core: Scheduler, replica: Replica) -> int:
    """Blocks of the replica that pinned prefixes have, or are to have."""
    named = [prefix for prefix in core.prefixes.all if prefix.name in replica.prefixes.names]
    return sum(_blocks(replica, len(prefix.token_ids)) for prefix in named) * len(replica.hello.kv_groups)


def fits(core: Scheduler, request: Request, replica: Replica, *, beside_pins: bool = True) -> bool:
    """Tells whether the replica could hold the request if nothing else were there but its pinned prefixes, or
    nothing."""
    taken = pinned(core, replica) if beside_pins else 0
    return worst_case(request, replica) + taken <= replica.hello.num_blocks


def _blocks(replica: Replica, num_tokens: int) -> int:
    return -(-num_tokens // replica.hello.block_size)


@dataclass(frozen=True, slots=True)
class _Before:
    """Holds the state before a turn: who waited; of each replica those that it might bring back; and of each of these
    its status and how often it had been preempted."""

    waiting: set[RequestGroup]
    claims: dict[Replica, list[RequestGroup]]
    status: dict[RequestGroup, SequenceStatus]
    preemptions: dict[RequestGroup, int]


class Promises:
    """To be shown a core before and after every event and every turn. `came_back` counts by what they were those that
    got their blocks back."""

    def __init__(self) -> None:
        self.came_back: Counter[SequenceStatus] = Counter()
        self._before: _Before | None = None
        self._accepted: dict[tuple[int | None, str, int], Request] = {}

    def before_event(self, core: Scheduler) -> None:
        """An event is about to be handled."""
        # Before the first worker came there was nothing to accept a request by.
        waiting = core.waiting if core.model is not None else ()
        self._accepted = {
            (group.frontend_id, group.request_id, group.request.attempt): group.request for group in waiting
        }

    def after_event(self, core: Scheduler, effects: list[Effect]) -> None:
        """Asserts that what these effects refuse for good can be held nowhere."""
        for effect in effects:
            if isinstance(effect, SendToFrontend) and isinstance(effect.message, Rejected):
                told = effect.message
                request = self._accepted.get((effect.frontend_id, told.request_id, told.attempt))
                if request is not None and told.reason is RejectReason.NEVER_FITS_KV:
                    self._assert_misfit(core, request)

    def _assert_misfit(self, core: Scheduler, request: Request) -> None:
        for replica in core.replicas.values():
            assert not fits(core, request, replica, beside_pins=not replica.is_ready), (
                f"{request.request_id} is told that it fits nowhere, and fits {replica.hello.worker_id}"
            )

    def before_turn(self, core: Scheduler) -> None:
        """A step is about to be planned."""
        returning = [group for group in core.waiting if group.comes_back]
        claims = {
            replica: [*replica.swapped, *(group for group in returning if fits(core, group.request, replica))]
            for replica in core.replicas.values()
            if replica.swapped or returning
        }
        groups = {group for groups in claims.values() for group in groups}
        self._before = _Before(
            set(core.waiting),
            claims,
            {group: group.status for group in groups},
            {group: group.preemptions for group in groups},
        )

    def after_turn(self, core: Scheduler) -> None:
        """Asserts who was served, and that nobody idles for nothing."""
        assert self._before is not None
        for replica, groups in self._before.claims.items():
            self._check_order(core, replica, groups, self._before)
        for replica in core.replicas.values():
            self._check_idleness(core, replica, self._before.waiting)

    def _check_order(self, core: Scheduler, replica: Replica, groups: list[RequestGroup], before: _Before) -> None:
        suspects, running = core.request_table.suspects, set(replica.running)
        back = [group for group in groups if group in running and group not in suspects]
        if not back:
            return
        self.came_back.update(before.status[group] for group in back)
        latest = max(back, key=lambda group: group.order)
        for group in groups:
            # One that has come back may have been the one to go at once.
            is_left = group.status is not SequenceStatus.RUNNING and group.preemptions == before.preemptions[group]
            may_come = group.status is SequenceStatus.SWAPPED or core.replica_table.takes(replica, group)
            may_come = may_come and not group.is_fetching
            assert not (is_left and may_come and group not in suspects and group.order < latest.order), (
                f"{latest.request_id} comes back to {replica.hello.worker_id} before {group.request_id}"
            )

    def _check_idleness(self, core: Scheduler, replica: Replica, waited: set[RequestGroup]) -> None:
        # The paper's policy looks at the head of the queue alone, and an experiment's memory is no paged one.
        if core.policy.lookahead == 1 or not isinstance(replica.kv, KVCacheManager) or not _idles(replica):
            return
        for group in core.waiting:
            # One that waits since this turn may find its place in the next.
            is_wanted = (
                group in waited
                and group not in core.request_table.suspects
                and not group.is_fetching
                and group.faults.non_finite_on != replica.replica_id
                and not _leaves_prompts(core, group, replica)
            )
            assert not (is_wanted and fits(core, group.request, replica)), (
                f"{replica.hello.worker_id} idles while {group.request_id} waits, which it could hold"
            )


def _leaves_prompts(core: Scheduler, group: RequestGroup, replica: Replica) -> bool:
    """Tells whether the replica is for what follows prompts, and another one, for these, gets new requests."""
    return replica.hello.role is WorkerRole.DECODE and any(
        other.hello.role is not WorkerRole.DECODE and other.is_ready and fits(core, group.request, other)
        for other in core.replicas.values()
    )


def _idles(replica: Replica) -> bool:
    return replica.is_ready and replica.may_plan and not (replica.has_work or replica.outstanding)
