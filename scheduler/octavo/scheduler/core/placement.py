"""Placement: which waiting group goes to which replica, by the order of the queue, room, and the least to wait for."""

from collections import Counter
from collections.abc import Collection

from octavo.scheduler.core.admission import has_capacity, refuse_misfit
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import PrefixGivenUp
from octavo.scheduler.core.peers.prefix_copies import PrefixCopies
from octavo.scheduler.core.pinned_prefixes import making_way_for
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.scheduler.core.waiting_queue import WaitingQueue
from octavo.wire.requests import RejectReason

# At most this many waiting groups are looked at, where those in front can go to no replica that has room.
_MAX_LOOKED_AT = 256


def next_admission(
    waiting: WaitingQueue,
    builders: list[StepBuilder],
    replica_table: ReplicaTable,
    prefix_copies: PrefixCopies,
    policy: StepPolicy,
    config: SchedulerConfig,
    now: float,
) -> tuple[RequestGroup, StepBuilder] | None:
    """Returns the group that is admitted next, and the step that it joins; None if none fits.

    A group that does not fit may be overtaken by those behind it until it has waited `overtaking_s`, so that a long
    prompt neither idles the blocks nor starves. From then on it holds back every replica that could ever hold it, and
    no other: what only a large one can hold idles no small one. A group that has run and lost its blocks does so at
    once. On each replica `lookahead` groups are tried. A group is passed over if no replica takes it that could ever
    hold it.
    """
    open_drafts = [builder for builder in builders if policy.admits(builder)] if waiting else []
    if not open_drafts:
        return None
    tried: Counter[int] = Counter()
    # With a lookahead of one, the paper's, the head of the queue alone is looked at, wherever it could go.
    for group in waiting.candidates(1 if policy.lookahead == 1 else _MAX_LOOKED_AT, replica_table.can_hold):
        possible = [
            builder
            for builder in open_drafts
            if replica_table.takes(builder.replica, group) and has_capacity(group.request, builder.replica)
        ]
        fitting = [
            builder for builder in possible if builder.obstacle(group, whole_prompt=policy.whole_prompts) is None
        ]
        if fitting:
            return group, _quickest(fitting, group, prefix_copies, now)
        tried.update(builder.replica.replica_id for builder in possible)
        is_overdue = now - group.arrival >= config.overtaking_s or waiting.has_run_before(group)
        closed = {
            builder.replica.replica_id
            for builder in possible
            if is_overdue or tried[builder.replica.replica_id] >= policy.lookahead
        }
        open_drafts = [builder for builder in open_drafts if builder.replica.replica_id not in closed]
        if not open_drafts:
            return None
    return None


def _quickest(builders: list[StepBuilder], group: RequestGroup, prefix_copies: PrefixCopies, now: float) -> StepBuilder:
    # Adding up a load costs a walk over all that runs, so only where there is a choice.
    if len(builders) == 1:
        return builders[0]
    usual_rate = _mean_rate(builders)
    saved = prefix_copies.savings(group, [builder.replica for builder in builders], now)
    return min(builders, key=lambda builder: _wait(builder.replica, group, usual_rate, saved.get(builder.replica, 0.0)))


def _mean_rate(builders: list[StepBuilder]) -> float:
    """Returns the mean token rate of the replicas that have been measured; a new one counts with it."""
    rates = [rate for builder in builders if (rate := builder.replica.stats.token_rate)]
    return sum(rates) / len(rates) if rates else 1.0


def _wait(replica: Replica, group: RequestGroup, usual_rate: float, num_saved: float) -> float:
    """Returns the seconds, or any unit in which all replicas are measured, until the group's prompt would be computed:
    so a prefix hit counts by the tokens it saves, as does what can be copied, less what that takes, and a fast replica
    by its speed."""
    num_tokens = replica.load + replica.kv.num_uncomputed(group) - num_saved
    return num_tokens / (replica.stats.token_rate or usual_rate)


def describe_wait(group: RequestGroup, position: int, replicas: Collection[Replica], now: float) -> str:
    """Says how long a group waited that is at `position` in the queue, and for what."""
    limit_s = (group.request.max_queue_ms or 0) / 1000.0
    return (
        f"waited {now - group.arrival:.1f} s of at most {limit_s:.1f} s {_cause(group, position, replicas)}; try again"
        " later, or allow more time in the queue"
    )


def _cause(group: RequestGroup, position: int, replicas: Collection[Replica]) -> str:
    ready = [replica for replica in replicas if replica.is_ready]
    if not ready:
        return "for a worker: there is none that takes requests"
    if position > 1:
        return f"behind {position - 1} other requests"
    obstacles = [(replica, StepBuilder(replica, replica.token_budget).obstacle(group)) for replica in ready]
    lacking = [
        f"{found.kind.value} of worker {replica.hello.worker_id} ({found.needed} needed, {found.available} available)"
        for replica, found in obstacles
        if found is not None
    ]
    return f"for {', '.join(lacking)}" if lacking else "for its turn"


# -- accepted requests without a home ----------------------------------------------------------------------------------

# Accepted requests that no registered replica can hold: pinned prefixes make way for them, or they are rejected in the
# end.
#
# Such requests were accepted when a larger worker was there, or by a scheduler before this one. That worker may come
# back: they wait for `misfit_grace_s` from the first look that finds workers and none that is large enough, and for as
# long as one that is large enough is there and merely takes nothing new (cordoned, or still draining). No other worker
# is known to come, for workers say nothing before they have loaded their model. While no worker is there at all,
# nothing is decided.


# Seconds between two looks, each of which walks over all waiting groups.
INTERVAL_S = 1.0


class Homeless:
    """Looks after accepted requests that no registered replica can hold, as time passes."""

    def __init__(self, state: SchedulerState) -> None:
        # Groups that no replica could hold, and since when that is known.
        self._since: dict[RequestGroup, float] = {}
        self._looked_at = float("-inf")
        self._state = state

    def look(self, now: float) -> None:
        """Makes room for such requests, and rejects those whose time is over; does nothing within `INTERVAL_S` of the
        last call."""
        state = self._state
        if now - self._looked_at < INTERVAL_S:
            return
        self._looked_at = now
        for group in [group for group in state.requests.waiting if not state.replica_table.has_home(group)]:
            self._make_way(group)
        if state.prefixes.make_owed(state.replicas, list(state.requests.waiting)):
            state.send_status()
        homeless = [group for group in state.requests.waiting if self._is_homeless(group)]
        self._since = {group: self._since.get(group, now) for group in homeless}
        for group, since in self._since.items():
            if now - since >= state.config.misfit_grace_s:
                self._reject(group)

    def _is_homeless(self, group: RequestGroup) -> bool:
        replicas = self._state.replicas
        return bool(replicas) and not any(has_capacity(group.request, replica) for replica in replicas)

    def _make_way(self, group: RequestGroup) -> None:
        """Gives up prefixes where the fewest are in the group's way, if that makes room for it anywhere."""
        state = self._state
        ready = [replica for replica in state.replicas if replica.is_ready]
        ways = {replica.replica_id: state.prefixes.in_the_way(group, replica) for replica in ready}
        possible = [(len(names), replica_id) for replica_id, names in ways.items() if names]
        if not possible:
            return
        _, replica_id = min(possible)
        for name in ways[replica_id] or []:
            state.prefixes.owe(name, state.replica_table.replicas[replica_id])
            state.outbox.add(PrefixGivenUp(replica_id, name, making_way_for(group)))
        state.send_status()

    def _reject(self, group: RequestGroup) -> None:
        state = self._state
        assert state.replica_table.model is not None
        refusal = refuse_misfit(
            group.request,
            state.replica_table.model,
            state.replicas,
            was_accepted=False,
        )
        reason, detail = refusal or (RejectReason.NEVER_FITS_KV, "no worker can hold it")
        grace = f"no worker that can has come within {state.config.misfit_grace_s:g} s"
        state.requests.reject(group, reason, f"{detail}, and {grace} (--misfit-grace)")
