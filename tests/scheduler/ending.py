"""How a history ends: nothing more goes wrong, time passes, and of all that is wanted each comes or is told why not."""

from octavo.scheduler.core.events import ReplicaHeard, WorkerReadmitted
from octavo.testing.cluster import Cluster
from octavo.wire.requests import RejectReason

from .journal import Journal

# An accepted request that no worker can hold is told after this long.
MISFIT_GRACE_S = 3.0
# Seconds between two turns in which nobody computes; and how many of these may come in a row while anything is wanted:
# the grace, and as much again for whatever else is waited for.
_PAUSE_S = 0.25
_MAX_PAUSES = round(2 * MISFIT_GRACE_S / _PAUSE_S)


def come_to_an_end(cluster: Cluster, journal: Journal, *, max_steps: int) -> None:
    """Every worker is there, beats and gets new requests, and each step is computed. Asserts that within bounded turns
    nothing is held any more: whatever fits a worker has come, and whatever fits none has been told."""
    for incarnation in list(cluster.core.replicas):
        cluster.handle(WorkerReadmitted(f"worker-{incarnation}"))
    journal.renew()
    num_pauses = 0
    for _ in range(max_steps):
        put_away_misfits(cluster, journal)
        if not cluster.core.groups and not any(replica.plans for replica in cluster.replicas.values()):
            return
        before = sum(len(replica.received) for replica in cluster.replicas.values())
        cluster.step()
        is_idle = before == sum(len(replica.received) for replica in cluster.replicas.values())
        num_pauses = num_pauses + 1 if is_idle else 0
        assert num_pauses <= _MAX_PAUSES, f"nothing is done for {sorted(cluster.groups)}, which are told nothing"
        if is_idle:
            _pause(cluster, journal)
    raise AssertionError(f"{sorted(cluster.groups)} are still held after {max_steps} steps")


def _pause(cluster: Cluster, journal: Journal) -> None:
    cluster.now += _PAUSE_S
    for incarnation in list(cluster.core.replicas):
        cluster.handle(ReplicaHeard(incarnation))
    journal.renew()
    cluster.tick(0.0)


def put_away_misfits(cluster: Cluster, journal: Journal) -> None:
    """Takes out of the journal what has been told that it fits nowhere: that this is so, the cluster asserts."""
    for name, rejection in list(cluster.rejected.items()):
        if rejection.reason is RejectReason.NEVER_FITS_KV:
            del cluster.rejected[name], journal.requests[name]
