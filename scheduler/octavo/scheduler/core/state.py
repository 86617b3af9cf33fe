"""The scheduler's state: what all that act on it share."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Outbox, SchedulerObserver
from octavo.scheduler.core.faults.poison import Quarantine
from octavo.scheduler.core.lookups.history import CacheExplanation, LookupHistory, explain_cache
from octavo.scheduler.core.peers.moves import Moves
from octavo.scheduler.core.peers.prefix_copies import PrefixCopies
from octavo.scheduler.core.peers.pulls import Pulls
from octavo.scheduler.core.pinned_prefixes import PrefixPins
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import CacheUse, Lookup, RequestGroup, TierTokens
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.speculation import Speculation
from octavo.scheduler.kv.memory import MakeMemory
from octavo.wire.requests import StatusChanged


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts what a reset of the prefix cache concerns, on all replicas: cached blocks, those of them that somebody
    holds, and pinned prefixes that are computed anew."""

    num_blocks: int
    num_in_use: int
    num_prefixes: int


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Holds the requests, replicas and pinned prefixes, the payloads that are refused, what gives drafts, what earlier
    requests have found, and where effects and observations go. `make_memory` makes the KV memory of each replica that
    joins."""

    config: SchedulerConfig
    make_memory: MakeMemory
    outbox: Outbox
    observer: SchedulerObserver
    prefixes: PrefixPins
    quarantine: Quarantine
    requests: RequestTable
    replica_table: ReplicaTable
    speculation: Speculation
    pulls: Pulls
    moves: Moves
    prefix_copies: PrefixCopies
    lookups: LookupHistory

    @classmethod
    def new(
        cls,
        config: SchedulerConfig,
        epoch: int,
        observer: SchedulerObserver,
        make_memory: MakeMemory,
        drafter: Drafter,
    ) -> "SchedulerState":
        """Makes the state of a scheduler that holds nothing yet."""
        outbox, speculation, lookups = Outbox(epoch), Speculation(config, drafter), LookupHistory()
        requests = RequestTable(config, outbox, observer, partial(_ended, speculation, lookups))
        replicas, quarantine = ReplicaTable(config, requests), Quarantine(config.quarantine_s)
        pulls = Pulls(outbox)
        return cls(
            config=config,
            make_memory=make_memory,
            outbox=outbox,
            observer=observer,
            prefixes=PrefixPins(),
            quarantine=quarantine,
            requests=requests,
            replica_table=replicas,
            speculation=speculation,
            pulls=pulls,
            moves=Moves(requests, replicas, pulls, observer),
            prefix_copies=PrefixCopies(replicas, pulls, observer),
            lookups=lookups,
        )

    @property
    def epoch(self) -> int:
        """Returns the number that tells this scheduler's messages from those of another."""
        return self.outbox.epoch

    @property
    def replicas(self) -> Collection[Replica]:
        """Returns the registered replicas, in order of registration."""
        return self.replica_table.replicas.values()

    def send_status(self) -> None:
        """Sends every frontend what it needs to know of the replicas."""
        for frontend_id in self.requests.held:
            self.outbox.to_frontend(frontend_id, StatusChanged(self.epoch, self.replica_table.status()))

    # -- resets of the prefix cache -----------------------------------------------------------------------------------

    def count_cached(self, salt: str | None) -> CacheCounts:
        """Counts what a reset of the blocks behind `salt`, None for all, would concern now."""
        memories = [replica.kv for replica in self.replicas]
        cached = [kv.cached_behind(salt) for kv in memories]
        num_in_cpu_memory = sum(len(kv.cpu_cached_behind(salt)) for kv in memories)
        free = [kv.cached_free_block_ids for kv in memories]
        num_in_use = sum(len(set(blocks) - each) for blocks, each in zip(cached, free, strict=True))
        num_prefixes = len(self.prefixes.all) if salt is None else 0
        return CacheCounts(sum(map(len, cached)) + num_in_cpu_memory, num_in_use, num_prefixes)

    def reset_cache(self, salt: str | None) -> None:
        """Lets no request find what is cached now behind `salt`, None for all, nor what running requests make of it;
        the outputs that drafts are copied from go too.

        Running requests keep their blocks, and their tokens stay the same. Pinned prefixes, in which no salt counts,
        are computed anew with a reset of all.
        """
        for replica in self.replicas:
            replica.kv.forget_cached(salt)
        self.speculation.reset_cache(salt, self.requests.groups)
        self.lookups.forget(salt)
        if salt is None:
            self.prefixes.compute_anew(self.replicas)

    # -- what was found -----------------------------------------------------------------------------------------------

    def note_lookup(self, group: RequestGroup, replica: Replica, now: float) -> None:
        """Remembers what the first admission of a group, to this replica, has found."""
        leader = group.holders[0]
        group.lookup = lookup = Lookup(
            request=group.request,
            frontend_id=group.frontend_id,
            replica_id=replica.replica_id,
            worker_id=replica.hello.worker_id,
            at=now,
            block_size=replica.kv.block_size,
            index=leader.index,
            output=leader.generated_token_ids,
            num_known=leader.num_known,
            found=group.found or TierTokens(),
            shares=replica.kv.shares_prefixes,
            is_bypassed=leader.cache_use is CacheUse.BYPASSED,
        )
        self.lookups.add(lookup)
        replica.stats.found(lookup.found)

    def explain_cache(self, lookup: Lookup, asker: str | None) -> CacheExplanation:
        """Says where the beginning of a request was found, and why the rest was not, to the tenant `asker`; to an
        operator for None. Where requests have no tenants, all askers but operators are told what they would be told of
        another tenant's request: anybody may have sent it."""
        replica = self.replica_table.replicas.get(lookup.replica_id)
        evicted_at = replica.kv.evicted_at(lookup) if replica is not None else None
        is_private = asker is None or (asker != "" and asker == lookup.request.tenant)
        return explain_cache(lookup, self.lookups, evicted_at, is_private=is_private)

    def explain_cache_of(self, group: RequestGroup, asker: str | None) -> CacheExplanation | None:
        """Returns the same of a request that is held; None before its first admission."""
        return self.explain_cache(group.lookup, asker) if group.lookup is not None else None


def _ended(speculation: Speculation, lookups: LookupHistory, group: RequestGroup) -> None:
    """Lets go of what is kept of a group that has ended, but for how its beginning was found."""
    speculation.forget(group)
    if group.lookup is not None:
        lookups.ended(group.lookup)
