"""What every block of a replica is used for, and by whom: read from the books, which stay as they are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.kv.blocks import present
from octavo.v1 import admin_pb2 as pb

_FREE: Final = int(pb.BLOCK_STATE_FREE)
_CACHED: Final = int(pb.BLOCK_STATE_CACHED)
_PRIVATE: Final = int(pb.BLOCK_STATE_PRIVATE)
_SHARED: Final = int(pb.BLOCK_STATE_SHARED)
_PINNED: Final = int(pb.BLOCK_STATE_PINNED)
_PARKED: Final = int(pb.BLOCK_STATE_PARKED)
_SWAPPED: Final = int(pb.BLOCK_STATE_SWAPPED)
# By the state of a block so far, the one it is in with another sequence that holds it.
_WITH_ONE_MORE: Final = bytes(_SHARED if state in (_PRIVATE, _SHARED) else _PRIVATE for state in range(8))


@dataclass(frozen=True, slots=True)
class Owner:
    """A request, or a prefix that is pinned or computed to be, and the blocks it holds, each named once."""

    name: str
    is_prefix: bool
    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """`states` and `cpu_states`: a `BlockState` for each block, by its id. Parked blocks have no owner."""

    states: bytes
    cpu_states: bytes
    owners: list[Owner]


def block_map(replica: Replica) -> BlockMap:
    """A walk over all tables, and what is cached beside them."""
    kv = replica.kv
    # Each kind of holder covers those before it.
    states = bytearray([_FREE]) * kv.num_blocks
    _mark(states, kv.blocks.cached_free_block_ids, _CACHED)
    _mark(states, kv.blocks.parked_block_ids, _PARKED)
    owners = [_running_owner(replica, group, states) for group in replica.running]
    cpu_states = bytearray([_FREE]) * kv.num_cpu_blocks
    owners += [_swapped_owner(replica, group, cpu_states) for group in replica.swapped]
    owners += list(_pinned_owners(replica, states))
    return BlockMap(bytes(states), bytes(cpu_states), owners)


def _mark(states: bytearray, block_ids: Iterable[int], state: int) -> None:
    for block_id in block_ids:
        states[block_id] = state


def _running_owner(replica: Replica, group: SequenceGroup, states: bytearray) -> Owner:
    tables = [present(replica.kv.block_table(sequence)) for sequence in replica.holders(group)]
    for block_ids in tables:
        for block_id in block_ids:
            states[block_id] = _WITH_ONE_MORE[states[block_id]]
    return Owner(group.prefix_name or group.request_id, group.prefix_name is not None, _joined(tables), [])


def _swapped_owner(replica: Replica, group: SequenceGroup, cpu_states: bytearray) -> Owner:
    block_ids = _joined(
        [present(replica.kv.swapper.space.table(sequence).groups) for sequence in replica.holders(group)]
    )
    _mark(cpu_states, block_ids, _SWAPPED)
    return Owner(group.request_id, False, [], block_ids)


def _pinned_owners(replica: Replica, states: bytearray) -> Iterator[Owner]:
    for name, block_ids in replica.kv.pins.by_name.items():
        _mark(states, block_ids, _PINNED)
        yield Owner(name, True, block_ids, [])


def _joined(tables: list[list[int]]) -> list[int]:
    """All blocks of some tables, each once, in order."""
    if len(tables) == 1:
        return tables[0]
    return list(dict.fromkeys(block_id for block_ids in tables for block_id in block_ids))
