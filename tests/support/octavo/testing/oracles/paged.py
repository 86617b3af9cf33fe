"""A replica's paged memory, for who looks at more of it than the scheduler's core does."""

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.kv.manager import KVCacheManager


def paged(replica: Replica) -> KVCacheManager:
    """The books of a replica's memory; fails for a memory of another kind."""
    assert isinstance(replica.kv, KVCacheManager)
    return replica.kv
