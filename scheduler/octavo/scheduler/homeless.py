"""Accepted requests that no replica there can hold: pinned prefixes make way for them, or they are told in the end.

Accepted they were when a larger worker was there, or by a scheduler before this one. That worker may come back: they
wait for `misfit_grace_s` from the first look that finds workers and none that is large enough, and for as long as one
that is large enough is there and merely takes nothing new (cordoned, or still draining). Nobody else is known to come,
for workers say nothing before they have loaded their model. While no worker is there at all, nothing is decided.
"""

from octavo.scheduler.admission import has_capacity, refuse_misfit
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import PrefixGivenUp
from octavo.scheduler.fleet import Fleet
from octavo.scheduler.ledger import Ledger
from octavo.scheduler.outbox import Outbox
from octavo.scheduler.prefix_pins import PrefixPins, making_way_for
from octavo.scheduler.sequence import SequenceGroup
from octavo.wire.requests import RejectReason

# Between two looks, each of which walks over all that waits.
INTERVAL_S = 1.0


class Homeless:
    """Looks after them, as time passes."""

    def __init__(
        self, config: SchedulerConfig, ledger: Ledger, fleet: Fleet, prefixes: PrefixPins, outbox: Outbox
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._fleet = fleet
        self._prefixes = prefixes
        self._outbox = outbox
        # Of those that no replica could hold: since when that is known.
        self._since: dict[SequenceGroup, float] = {}
        self._looked_at = float("-inf")

    def look(self, now: float) -> None:
        """Does what is to be done, if it is time to."""
        if now - self._looked_at < INTERVAL_S:
            return
        self._looked_at = now
        for group in [group for group in self._ledger.waiting if not self._fleet.has_home(group)]:
            self._make_way(group)
        if self._prefixes.make_owed(self._fleet.replicas.values(), list(self._ledger.waiting)):
            self._fleet.tell_status()
        homeless = [group for group in self._ledger.waiting if self._is_homeless(group)]
        self._since = {group: self._since.get(group, now) for group in homeless}
        for group, since in self._since.items():
            if now - since >= self._config.misfit_grace_s:
                self._tell(group)

    def _is_homeless(self, group: SequenceGroup) -> bool:
        replicas = self._fleet.replicas.values()
        return bool(replicas) and not any(has_capacity(group.request, replica) for replica in replicas)

    def _make_way(self, group: SequenceGroup) -> None:
        """Gives up prefixes where the fewest are in its way, if that makes room for it anywhere."""
        ready = [replica for replica in self._fleet.replicas.values() if replica.is_ready]
        ways = {replica.replica_id: self._prefixes.in_the_way(group, replica) for replica in ready}
        possible = [(len(names), replica_id) for replica_id, names in ways.items() if names]
        if not possible:
            return
        _, replica_id = min(possible)
        for name in ways[replica_id] or []:
            self._prefixes.owe(name, self._fleet.replicas[replica_id])
            self._outbox.add(PrefixGivenUp(replica_id, name, making_way_for(group)))
        self._fleet.tell_status()

    def _tell(self, group: SequenceGroup) -> None:
        assert self._fleet.model is not None
        refusal = refuse_misfit(group.request, self._fleet.model, self._fleet.replicas.values(), was_accepted=False)
        reason, detail = refusal or (RejectReason.NEVER_FITS_KV, "no worker can hold it")
        grace = f"no worker that can has come within {self._config.misfit_grace_s:g} s"
        self._ledger.reject(group, reason, f"{detail}, and {grace} (--misfit-grace)")
