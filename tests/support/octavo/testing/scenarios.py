"""Driving a `Cluster` to the point a test is about, and reading what its replicas were told."""

from collections.abc import Callable, Iterable
from itertools import pairwise

from octavo.scheduler.core.events import SequenceEnded, StepAnswered
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.testing.cluster import FRONTEND, Cluster, FakeReplica, reference_tokens
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import StepPlan


def plans(replica: FakeReplica) -> list[StepPlan]:
    """All plans a replica has got, answered or not."""
    return [message for message in replica.received if isinstance(message, StepPlan)]


def beams(width: int, length_penalty: float = 1.0, early_stopping: EarlyStopping = EarlyStopping.OFF) -> BeamSearch:
    """Makes a beam search as most clients ask for it."""
    return BeamSearch(width, length_penalty, early_stopping)


def step_until(cluster: Cluster, reached: Callable[[], bool], max_steps: int = 500) -> None:
    """Steps until `reached`; fails if that takes more than `max_steps`."""
    for _ in range(max_steps):
        if reached():
            return
        cluster.step()
    raise AssertionError(f"not reached in {max_steps} steps")


def answer(cluster: Cluster, incarnation: int = 1, *, fail: bool = False) -> None:
    """A replica answers its oldest plan; nothing new is planned."""
    cluster.handle(StepAnswered(incarnation, cluster.replicas[incarnation].execute(fail=fail)))


def drain(cluster: Cluster) -> None:
    """Every replica answers all its plans; nothing new is planned."""
    for incarnation, replica in cluster.replicas.items():
        while replica.plans:
            answer(cluster, incarnation)


def end_sequence(cluster: Cluster, request_id: str, index: int) -> None:
    """The frontend finds a stop string in one sequence."""
    attempt = cluster.groups[request_id].request.attempt
    cluster.handle(SequenceEnded(FRONTEND, request_id, attempt, index))


def plan_until(cluster: Cluster, wanted: Callable[[StepPlan], bool], max_steps: int = 500) -> StepPlan:
    """Plans as far ahead as allowed and answers one by one until replica 1 gets a plan that is `wanted`; that one and
    those before it that are not answered are left outstanding."""
    replica = cluster.replicas[1]
    for _ in range(max_steps):
        num_plans = len(plans(replica))
        cluster.schedule()
        if len(plans(replica)) == num_plans:
            cluster.now += 0.01
            answer(cluster)
        elif wanted(plans(replica)[-1]):
            return plans(replica)[-1]
    raise AssertionError(f"no such plan in {max_steps} steps")


def ids(groups: Iterable[SequenceGroup]) -> list[str]:
    """The names of the requests, in order."""
    return [group.request_id for group in groups]


def references(*requests: Request) -> dict[str, list[list[int]]]:
    """Returns the tokens that the sequences of sampling requests generate when nothing goes wrong, by request id."""
    return {
        request.request_id: [reference_tokens(request, index) for index in range(request.sampling.num_sequences)]
        for request in requests
    }


def undisturbed(make_cluster: Callable[[], Cluster], *requests: Request) -> dict[str, list[list[int]]]:
    """Returns the tokens that each request generates alone, where nothing is lacking, by request id."""
    found = {}
    for request in requests:
        cluster = make_cluster()
        cluster.join(num_blocks=1000)
        cluster.submit(request)
        cluster.run()
        found[request.request_id] = cluster.outputs(request.request_id)
    return found


def outputs(cluster: Cluster, *requests: Request) -> dict[str, list[list[int]]]:
    """Returns the tokens that have come of requests, by request id."""
    return {request.request_id: cluster.outputs(request.request_id) for request in requests}


def admissions(replica: FakeReplica, *requests: Request) -> list[str]:
    """The names of the requests that were started, in order; starts of one request in a row count once. Their prompts
    must differ."""
    names = {tuple(request.prompt_token_ids): request.request_id for request in requests}
    starts = [names.get(tuple(start.prompt_token_ids), "") for plan in plans(replica) for start in plan.starts]
    return [name for previous, name in pairwise(["", *starts]) if name and name != previous]
