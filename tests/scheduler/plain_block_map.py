"""What the blocks of a replica are used for, counted block by block from whoever holds it."""

from collections import Counter

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import PrefixGroup
from octavo.scheduler.kv.blocks import present
from octavo.scheduler.server.admin_messages import BlockMap, block_map
from octavo.testing.oracles.paged import paged
from octavo.v1 import admin_pb2 as pb


def assert_block_map_agrees(replica: Replica) -> BlockMap:
    """The map of a replica, which says what a plain count does."""
    found = block_map(replica)
    assert list(found.states) == _states(replica)
    assert list(found.cpu_states) == _cpu_states(replica)
    for owner in found.owners:
        assert len(set(owner.block_ids)) == len(owner.block_ids)
        assert len(set(owner.cpu_block_ids)) == len(owner.cpu_block_ids)
    named = sorted(
        (owner.name, owner.is_prefix, set(owner.block_ids), set(owner.cpu_block_ids)) for owner in found.owners
    )
    assert named == sorted(_owners(replica))
    return found


def _states(replica: Replica) -> list[int]:
    kv = paged(replica)
    sequences = Counter(block_id for table in kv._tables.values() for block_id in table.block_ids)
    pins = Counter(block_id for held in kv.pinned.values() for block_id in held)
    parked = Counter(block_id for block_ids in kv.blocks.parked.values() for block_id in block_ids)
    # Who copies a block elsewhere makes it nobody's here.
    lent = kv.peers.lent if kv.peers is not None else Counter[int]()
    states = []
    for block_id in range(kv.num_blocks):
        held = sequences[block_id]
        assert kv.ref_count(block_id) == held + pins[block_id] + parked[block_id] + lent[block_id]
        if pins[block_id]:
            states.append(pb.BLOCK_STATE_PINNED)
        elif held:
            states.append(pb.BLOCK_STATE_SHARED if held > 1 else pb.BLOCK_STATE_PRIVATE)
        elif parked[block_id]:
            states.append(pb.BLOCK_STATE_PARKED)
        else:
            cached = kv._cache.content(block_id) is not None or lent[block_id]
            states.append(pb.BLOCK_STATE_CACHED if cached else pb.BLOCK_STATE_FREE)
    return [int(state) for state in states]


def _cpu_states(replica: Replica) -> list[int]:
    space = paged(replica).swap_space
    held = {block_id for table in space.tables.values() for block_id in table.block_ids}
    kv = paged(replica)
    arriving = {move.target for arrival in space.arrivals for move in arrival.moves} | set(kv.reads.held)
    states = []
    for block_id in range(space.pool.num_blocks):
        if block_id in held:
            states.append(pb.BLOCK_STATE_SWAPPED)
        elif block_id in arriving:
            states.append(pb.BLOCK_STATE_ARRIVING)
        else:
            cached = kv.cpu_blocks.cache.content(block_id) is not None
            states.append(pb.BLOCK_STATE_CACHED if cached else pb.BLOCK_STATE_FREE)
    return [int(state) for state in states]


def _owners(replica: Replica) -> list[tuple[str, bool, set[int], set[int]]]:
    """From the tables: each sequence belongs to one group."""
    kv = paged(replica)
    owners = [(name, True, set(held), set[int]()) for name, held in kv.pinned.items()]
    for group in (*replica.running, *replica.swapped):
        members = set(group.sequences)
        tables = [present(t.groups) for s, t in kv._tables.items() if s in members]
        cpu_tables = [present(t.groups) for s, t in kv.swap_space.tables.items() if s in members]
        is_prefix = isinstance(group, PrefixGroup)
        name = group.prefix_name if isinstance(group, PrefixGroup) else group.request_id
        owners.append((name, is_prefix, set().union(*tables), set().union(*cpu_tables)))
    return owners
