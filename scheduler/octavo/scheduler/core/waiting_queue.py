"""Groups that wait for a replica, in an order by which tenants share fairly and nobody waits for ever.

Groups that lost their blocks come back first, in their order. Of the others the tenant comes next that has been served
least, counted in tokens over its weight (virtual time: Sheng et al., "Fairness in Serving Large Language Models",
2024). A tenant of which nothing was waiting starts no earlier than the least served one in the queue, so idleness earns
nothing; what it was served beyond that is kept in mind, even if it goes and comes back. Within a tenant the order is
that of arrival, in which a level of priority counts as having come `priority_ageing_s` earlier: a request of higher
priority that comes later than that cannot get in front.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice

from octavo.scheduler.core.sequence import RequestGroup


@dataclass(slots=True)
class Tenant:
    """A tenant has a queue and an account here. `num_groups` counts the groups that are held for it, waiting or not."""

    name: str
    weight: float
    virtual_time: float = 0.0
    num_groups: int = 0
    waiting: list[RequestGroup] = field(default_factory=list)


class WaitingQueue:
    """Holds waiting groups in sorted lists: insertion and removal move pointers, which for thousands of groups costs
    microseconds."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._resumed: list[RequestGroup] = []
        self._tenants: dict[str, Tenant] = {}
        # The tenant whose queue was the last to become empty.
        self._last = Tenant("", 1.0)
        # Virtual times of tenants that hold nothing now and were served more than those that wait.
        self._debts: dict[str, float] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[RequestGroup]:
        """Yields groups in the order in which they would be admitted if all fitted and all were equally long."""
        yield from self._resumed
        for tenant in self._by_service():
            yield from tenant.waiting

    def positions(self, groups: Iterable[RequestGroup]) -> list[int]:
        """Returns the position of each of `groups`, which wait, in that order, from 1 on. Asserts that each waits."""
        tenants = self._by_service()
        before = list(accumulate((len(tenant.waiting) for tenant in tenants), initial=len(self._resumed)))
        first = {tenant.name: count for tenant, count in zip(tenants, before, strict=False)}
        return [self._position(group, first) for group in groups]

    def _position(self, group: RequestGroup, first: Mapping[str, int]) -> int:
        """Returns the position of `group`; `first` counts the groups before each tenant's."""
        place = _place(self._resumed, group)
        if place is None:
            place = _place(self.tenant(group).waiting, group)
            assert place is not None, f"request {group.request_id} is not waiting"
            place += first[group.request.tenant]
        return place + 1

    @property
    def returning(self) -> Iterator[RequestGroup]:
        """Yields the groups that ran and lost their blocks, in their order."""
        return iter(self._resumed)

    @property
    def tenants(self) -> list[Tenant]:
        """Returns the accounts of tenants for which any group is held."""
        return list(self._tenants.values())

    def enter(self, group: RequestGroup) -> None:
        """Adds a new group."""
        tenant = self.tenant(group)
        if not tenant.waiting:
            tenant.virtual_time = max(tenant.virtual_time, self._floor())
        tenant.num_groups += 1
        self._insert(tenant.waiting, group)

    def resume(self, group: RequestGroup) -> None:
        """Adds a group that ran and lost its blocks, in front of those that never ran."""
        self._insert(self._resumed, group)

    def remove(self, group: RequestGroup) -> None:
        """Takes a group out of the queue. Raises `ValueError` if it does not wait."""
        tenant = self.tenant(group)
        if not (_remove(self._resumed, group) or _remove(tenant.waiting, group)):
            raise ValueError(f"request {group.request_id} is not waiting")
        self._size -= 1
        if not tenant.waiting:
            self._last = tenant

    def leave(self, group: RequestGroup) -> None:
        """Closes the account of a group that does not wait and is no longer held."""
        tenant = self.tenant(group)
        tenant.num_groups -= 1
        if tenant.num_groups == 0:
            del self._tenants[tenant.name]
            self._debts[tenant.name] = tenant.virtual_time
            self._settle()

    def charge(self, group: RequestGroup, num_tokens: int) -> None:
        """Counts `num_tokens` tokens as served to the group's tenant."""
        tenant = self.tenant(group)
        tenant.virtual_time += num_tokens / tenant.weight

    def charge_each(self, groups: Iterable[RequestGroup]) -> None:
        """Counts a token for each group. A tenant that is alone need not count: whoever comes starts where it
        stands."""
        if len(self._tenants) > 1:
            for group in groups:
                self.charge(group, 1)

    def tenant(self, group: RequestGroup) -> Tenant:
        """Returns the account of a group's tenant; opens one if there is none."""
        name = group.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = Tenant(name, self._weights.get(name, 1.0), self._debts.pop(name, 0.0))
            self._tenants[name] = tenant
        return tenant

    def _floor(self) -> float:
        """Returns the virtual time below which no tenant starts; it never falls."""
        waiting = (tenant.virtual_time for tenant in self._tenants.values() if tenant.waiting)
        return min(waiting, default=self._last.virtual_time)

    def _settle(self) -> None:
        """Forgets debts that no longer set a tenant back."""
        floor = self._floor()
        self._debts = {name: time for name, time in self._debts.items() if self._tenants and time > floor}

    def candidates(self, limit: int, has_place: Callable[[RequestGroup], bool]) -> Iterator[RequestGroup]:
        """Yields the next group to be admitted, then those that may go in its place where it does not fit, `limit` in
        all.

        Groups for which `has_place` returns False are passed over.
        """
        return islice(filter(has_place, self), limit) if self else iter(())

    def has_run_before(self, group: RequestGroup) -> bool:
        """Tells whether a waiting group has run and lost its blocks."""
        return _place(self._resumed, group) is not None

    def _by_service(self) -> list[Tenant]:
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        return sorted(waiting, key=lambda tenant: (tenant.virtual_time, tenant.waiting[0].order))

    def _insert(self, groups: list[RequestGroup], group: RequestGroup) -> None:
        bisect.insort(groups, group, key=lambda waiting: waiting.order)
        self._size += 1


def _remove(groups: list[RequestGroup], group: RequestGroup) -> bool:
    place = _place(groups, group)
    if place is None:
        return False
    del groups[place]
    return True


def _place(groups: list[RequestGroup], group: RequestGroup) -> int | None:
    place = bisect.bisect_left(groups, group.order, key=lambda waiting: waiting.order)
    return place if place < len(groups) and groups[place] is group else None


class QueueTimes:
    """Holds requests that wait for their first admission, and may do so only for so long, sorted by the end of their
    time: adding or removing one moves pointers.

    The age counts from the request's first arrival at its frontend, through all submissions. A request that is
    resubmitted with tokens has run before, and may wait; one that is resubmitted without any counts as never admitted,
    since nothing has come of it. (So does a beam search, whose tokens all come at its end.)
    """

    def __init__(self) -> None:
        self._groups: list[RequestGroup] = []

    def add(self, group: RequestGroup) -> None:
        """Keeps a group that begins to wait, if its time is limited."""
        if group.request.max_queue_ms is not None and not group.has_run:
            bisect.insort(self._groups, group, key=_end)

    def discard(self, group: RequestGroup) -> None:
        """Forgets a group that is admitted or dropped."""
        if group.request.max_queue_ms is None or not self._groups:
            return
        place = bisect.bisect_left(self._groups, _end(group), key=_end)
        if place < len(self._groups) and self._groups[place] is group:
            del self._groups[place]

    def overdue(self, now: float) -> list[RequestGroup]:
        """Returns the groups that have waited longer than they may, in the order in which their time ran out."""
        count = 0
        while count < len(self._groups) and _end(self._groups[count])[0] < now:
            count += 1
        return self._groups[:count]


def _end(group: RequestGroup) -> tuple[float, int]:
    """Returns the end of the group's time on the scheduler's clock, and its serial number of submission."""
    return group.arrival + (group.request.max_queue_ms or 0) / 1000.0, group.order[1]
