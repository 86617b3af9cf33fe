"""What tests look at: plans, blocks and hits; and sequences without a scheduler around them."""

from collections.abc import Callable

import msgspec

from octavo.scheduler.core.sequence import PrefixGroup, RequestGroup, Sequence, SequenceGroup, new_sequences
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.testing.cluster import Cluster, FakeReplica, make_request
from octavo.testing.oracles.paged import paged
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import CacheKey
from octavo.wire.steps import StepPlan


def plans(replica: FakeReplica) -> list[StepPlan]:
    """All plans so far."""
    return [message for message in replica.received if isinstance(message, StepPlan)]


def computed(replica: FakeReplica) -> list[int]:
    """Tokens computed by each plan so far."""
    return [sum(work.num_tokens for work in plan.work) for plan in plans(replica)]


def kv_of(cluster: Cluster, incarnation: int = 1) -> KVCacheManager:
    """The books of a replica's memory."""
    return paged(cluster.core.replicas[incarnation])


def num_held(cluster: Cluster, incarnation: int = 1) -> int:
    """Blocks that anybody holds."""
    kv = kv_of(cluster, incarnation)
    return kv.num_blocks - kv.num_free


def sequence(cluster: Cluster, request_id: str, index: int = 0) -> Sequence:
    """A live sequence of a request."""
    (found,) = (each for each in cluster.groups[request_id].live if each.index == index)
    return found


def table(cluster: Cluster, request_id: str, index: int = 0, kv_group: int = 0) -> list[int]:
    """The block table of a running sequence."""
    return list(kv_of(cluster).block_table(sequence(cluster, request_id, index))[kv_group])


def blocks(cluster: Cluster, request_id: str) -> set[int]:
    """All blocks that a running request holds."""
    group, kv = cluster.groups[request_id], kv_of(cluster)
    tables = [kv.block_table(sequence) for sequence in group.live if kv.holds(sequence)]
    return {block_id for groups in tables for table in groups for block_id in table} - {NULL_BLOCK}


def cached_tokens(cluster: Cluster) -> dict[str, int]:
    """Cached prompt tokens as reported with each request's first sequence."""
    return {
        request_id: deltas[0].cached_prompt_tokens
        for (request_id, index), deltas in cluster.deltas.items()
        if index == 0
    }


def sequence_of(prompt: list[int], *, adapter: str = "", salt: str = "", salted_from: int = 0) -> Sequence:
    """One that waits, with nothing generated."""
    key = CacheKey(adapter, salt, salted_from)
    request = msgspec.structs.replace(make_request("r", 1, 64), prompt_token_ids=prompt, cache_key=key)
    (sequence,) = new_sequences(request)
    return sequence


def group_of(*sequences: Sequence, prefix_name: str | None = None) -> SequenceGroup:
    """A group of them, as memory sees it."""
    request = make_request("r", 1, 64)
    group: SequenceGroup = RequestGroup(request, 0.0, (0.0, 0), frontend_id=1)
    if prefix_name is not None:
        group = PrefixGroup(request, 0.0, (0.0, 0), prefix_name=prefix_name)
    group.sequences = list(sequences)
    return group


def num_found(kv: KVCacheManager, prompt: list[int]) -> int:
    """Tokens of a prompt that would not be computed again."""
    return len(prompt) - kv.num_uncomputed(group_of(sequence_of(prompt)))


def step_until(cluster: Cluster, holds: Callable[[], object], max_steps: int = 200) -> None:
    """Steps until `holds` says so; fails if that takes more than `max_steps`."""
    for _ in range(max_steps):
        if holds():
            return
        cluster.step()
    raise AssertionError(f"nothing of the kind has happened in {max_steps} steps")
