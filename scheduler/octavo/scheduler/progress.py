"""Whether steps come back while there is work: what the health of a scheduler means."""

from octavo.scheduler.admission import has_capacity
from octavo.scheduler.scheduler import Scheduler

# Of work that could run, without an answer to any step: at least so many seconds, and so many times what the slowest
# step under way may take.
_LEAST_S = 10.0
_FACTOR = 3.0


class Progress:
    """Looked at again and again; `now` is the core's time."""

    def __init__(self) -> None:
        self._busy_since: float | None = None

    def stalled(self, core: Scheduler, now: float) -> str | None:
        """Why the scheduler counts as stuck, if it does."""
        if not _has_work(core):
            self._busy_since = None
            return None
        if self._busy_since is None:
            self._busy_since = now
        silence = now - max(self._busy_since, *(replica.answered_at for replica in core.replicas.values()))
        allowance = max(_LEAST_S, _FACTOR * max(replica.step_allowance for replica in core.replicas.values()))
        if silence <= allowance:
            return None
        return f"there is work, and no step was answered for {silence:.1f} s of {allowance:.1f} s"


def _has_work(core: Scheduler) -> bool:
    """Whether something could run: what waits for a larger worker than there is waits rightly."""
    replicas = core.replicas.values()
    if any(replica.running or replica.swapped for replica in replicas):
        return True
    return any(has_capacity(group.request, replica) for group in core.waiting for replica in replicas)
