"""Whatever state a scheduler comes to, every verdict of `explain` is what its next planning does."""

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.scheduler.core.explain import Explanation, explain, homes_of_groups
from octavo.scheduler.core.sequence import RequestGroup, SequenceGroup, SequenceStatus
from octavo.testing.cluster import Cluster

from .test_scheduler_machine import SchedulerMachine

_FEW_EXAMPLES = 15
_EXAMPLES = 40 * int(os.environ.get("OCTAVO_TEST_LONG", "1"))


class JudgedCluster(Cluster):
    """Asks before each planning where everything stands, and compares that with what comes of it."""

    def schedule(self) -> None:
        core = self.core
        found = {group: _explained(self, group) for group in core.groups}
        preemptions = {group: group.preemptions for group in found}
        waited = [group for group in found if group.status is not SequenceStatus.RUNNING]
        homes = homes_of_groups(core.state)
        # One that may not plan now has no next step yet; nor has a suspect where a step is under way.
        asked = {group: _num_copies(group) for group in waited}
        busy = [replica for replica in core.replicas.values() if not replica.may_plan]
        occupied = [replica for replica in core.replicas.values() if replica.outstanding]
        super().schedule()
        for group in waited:
            explanation = found[group]
            if group.is_finished or homes.get(group) in busy:
                continue
            barred = occupied if group in core.request_table.suspects else busy
            if group not in homes and any(core.replica_table.may_take(replica, group) for replica in barred):
                continue
            # It may be the one to go where a decode of the same step finds no block.
            joins = group.status is SequenceStatus.RUNNING or group.preemptions > preemptions[group]
            # What another worker has computed of its beginning is looked for when its turn has come.
            if explanation.queue_position == 1 and not joins and _num_copies(group) > asked[group]:
                continue
            self._judge(explanation, joins)

    def _judge(self, explanation: Explanation, joins: bool) -> None:
        kinds = {each.obstacle.kind for each in explanation.obstacles}
        if explanation.queue_position == 1:
            assert joins == (not kinds), (joins, explanation)
        elif kinds:
            # What goes before it makes no room, but for a beginning that it shares.
            assert not joins or self.core.config.prefix_caching, explanation


def _num_copies(group: SequenceGroup) -> int:
    """How many copies of its beginning, from other workers, it was made to wait for."""
    reads = group.reads if isinstance(group, RequestGroup) and group.reads else {}
    return sum(bool(read.source) for each in reads.values() for read in each)


def _explained(cluster: Cluster, group: SequenceGroup) -> Explanation:
    [explanation] = [
        each
        for each in explain(cluster.core.state, cluster.core.policy, group.request_id, cluster.now)
        if each.group is group
    ]
    return explanation


class ExplainedMachine(SchedulerMachine):
    """The same states as without explanations."""

    make_cluster = JudgedCluster


TestExplainedMachine = ExplainedMachine.TestCase
TestExplainedMachine.settings = settings(
    max_examples=_FEW_EXAMPLES, stateful_step_count=30, derandomize=True, deadline=None
)


@pytest.mark.deep
def test_many_more_histories() -> None:
    many = settings(max_examples=_EXAMPLES, stateful_step_count=30, derandomize=True, deadline=None)
    run_state_machine_as_test(ExplainedMachine, settings=many)
