"""Prefixes that are kept computed under a name (paper §4.4), and the requests that compute them."""

from collections.abc import Collection, Iterable

from octavo.scheduler.core.admission import has_capacity, worst_case_blocks
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import PrefixGroup, RequestGroup
from octavo.wire.pooling import PoolingParams
from octavo.wire.requests import MAX_PREFIXES, NO_CACHE_KEY, Prefix, Request
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import ModelInfo


class PrefixPins:
    """Holds all pinned prefixes, by name. Every replica computes each of them once, as far as its budget goes."""

    def __init__(self) -> None:
        self._prefixes: dict[str, Prefix] = {}
        self._count = 0

    @property
    def all(self) -> list[Prefix]:
        return list(self._prefixes.values())

    def get(self, name: str) -> Prefix | None:
        return self._prefixes.get(name)

    def refusal(
        self,
        prefix: Prefix,
        model: ModelInfo | None,
        replicas: Collection[Replica],
        groups: Iterable[RequestGroup],
    ) -> str | None:
        """Returns why `prefix` cannot be pinned; None if it can."""
        if prefix.name in self._prefixes:
            return f"a prefix named {prefix.name!r} is pinned already; unpin it first, or choose another name"
        if len(self._prefixes) >= MAX_PREFIXES:
            return f"{MAX_PREFIXES} prefixes are pinned, which is the limit; unpin one first"
        if model and (refusal := _model_refusal(prefix, model)):
            return refusal
        for replica in replicas:
            if refusal := self._budget_refusal(prefix, replica):
                return refusal
        # Requests that wait while there is no replica wait for one that is large enough.
        for group in groups if replicas else ():
            if not any(_still_fits(group, replica, prefix) for replica in _homes(group, replicas)):
                return f"request {group.request_id} may need the blocks before it ends; try again later"
        return None

    def _budget_refusal(self, prefix: Prefix, replica: Replica) -> str | None:
        blocks, budget = replica.kv.blocks_for(len(prefix.token_ids)), replica.pinned_budget
        # Prefixes that are owed will take their blocks again.
        owed = sum(blocks for name, blocks in replica.prefixes.owed.items() if name != prefix.name)
        taken = replica.kv.num_blocks - replica.kv.num_usable + owed
        if taken + blocks <= budget:
            return None
        return (
            f"the prefix takes {blocks} blocks of worker {replica.hello.worker_id}, whose budget for pinned prefixes is"
            f" {budget} of {replica.kv.num_blocks} blocks with {taken} taken; shorten it, unpin another, or raise"
            " --max-pinned-share"
        )

    def pin(self, prefix: Prefix, replicas: Iterable[Replica]) -> None:
        """Has every replica compute the prefix before anything else that is new to it."""
        self._prefixes[prefix.name] = prefix
        for replica in replicas:
            self._add(prefix, replica)

    def unpin(self, name: str, replicas: Iterable[Replica]) -> None:
        """Makes the prefix ordinary cached content. Raises `KeyError` for an unknown name."""
        prefix = self._prefixes.pop(name)
        for replica in replicas:
            replica.give_up_prefix(prefix)

    def compute_anew(self, replicas: Iterable[Replica]) -> None:
        """Has every replica compute again, before anything else that is new there, the prefixes that it has or is to
        have. Who runs with their blocks keeps these."""
        for replica in replicas:
            for prefix in [each for each in self.all if each.name in replica.prefixes.names]:
                replica.give_up_prefix(prefix)
                self._add(prefix, replica)

    def give_up(self, name: str, replica: Replica) -> None:
        """Lets the replica, which has or was to have the prefix, go on without it."""
        replica.give_up_prefix(self._prefixes[name])

    def equip(
        self, replica: Replica, replicas: Collection[Replica], waiting: Collection[RequestGroup]
    ) -> dict[str, RequestGroup]:
        """Has a replica that joins compute the prefixes that fit its budget, in the order of pinning.

        A prefix is owed to the replica instead while it takes blocks without which a request that was accepted would
        have no home among `replicas`. Returns these requests by the names of the prefixes.
        """
        claimants: dict[str, RequestGroup] = {}
        for prefix in self._prefixes.values():
            # The prefix may have been pinned before any worker had named its model.
            if _model_refusal(prefix, replica.hello.model) or self._budget_refusal(prefix, replica):
                continue
            if claimant := _claimant(prefix, replica, replicas, waiting):
                claimants[prefix.name] = claimant
                replica.owe_prefix(prefix)
            else:
                self._add(prefix, replica)
        return claimants

    def in_the_way(self, group: RequestGroup, replica: Replica) -> list[str] | None:
        """Returns the prefixes without which the replica could hold the group, the latest first; None if it never
        could."""
        kv, names = replica.kv, list[str]()
        lacking = worst_case_blocks(group.request, replica) - kv.num_usable
        for prefix in reversed([each for each in self.all if each.name in replica.prefixes.names]):
            if lacking <= 0:
                break
            names.append(prefix.name)
            lacking -= kv.blocks_for(len(prefix.token_ids))
        return names if lacking <= 0 else None

    def owe(self, name: str, replica: Replica) -> None:
        """Lets the replica go on without the prefix until `make_owed` finds that no request needs its blocks any
        more."""
        replica.owe_prefix(self._prefixes[name])

    def make_owed(self, replicas: Collection[Replica], waiting: Collection[RequestGroup]) -> bool:
        """Has replicas compute the prefixes they are owed, where no request needs the blocks any more. Returns whether
        there were any."""
        made = [
            (prefix, replica)
            for replica in replicas
            for prefix in self.all
            if prefix.name in replica.prefixes.owed and self._make_owed(prefix, replica, replicas, waiting)
        ]
        return bool(made)

    def _make_owed(
        self,
        prefix: Prefix,
        replica: Replica,
        replicas: Collection[Replica],
        waiting: Collection[RequestGroup],
    ) -> bool:
        if self._budget_refusal(prefix, replica) or _claimant(prefix, replica, replicas, waiting):
            return False
        self._add(prefix, replica)
        return True

    def _add(self, prefix: Prefix, replica: Replica) -> None:
        replica.keep_prefix(self._group(prefix, replica))

    def _group(self, prefix: Prefix, replica: Replica) -> PrefixGroup:
        self._count += 1
        model = replica.hello.model
        request = Request(
            request_id=f"prefix {prefix.name}",
            attempt=self._count,
            resubmitted=False,
            model_fingerprint=model.fingerprint,
            prompt_token_ids=prefix.token_ids,
            generated=[],
            # The one token, or output, is thrown away: the KV of the prompt is wanted.
            sampling=SamplingParams(max_tokens=1),
            priority=0,
            tenant="",
            cache_key=NO_CACHE_KEY,
            age_ms=0,
            pooling=None if model.pooling is None else PoolingParams(model.pooling.task),
        )
        first = float("-inf")
        return PrefixGroup(request, first, (first, self._count), prefix_name=prefix.name)


def _model_refusal(prefix: Prefix, model: ModelInfo) -> str | None:
    if model.pooling is not None and model.pooling.gathers:
        return (
            f"{model.name} makes its outputs of all tokens of a text, so that each text is computed from the first on"
        )
    if len(prefix.token_ids) + 1 >= model.max_model_len:
        return f"{len(prefix.token_ids)} tokens leave no room in the context of {model.max_model_len}"
    if max(prefix.token_ids) >= model.vocab_size:
        return f"a token id is outside the vocabulary of {model.vocab_size}"
    return None


def _homes(group: RequestGroup, replicas: Collection[Replica]) -> Collection[Replica]:
    """Returns the replicas where a group can go on: the one where it runs or is swapped out, or all."""
    at_home = [replica for replica in replicas if group in replica.running or group in replica.swapped]
    return at_home or replicas


def _claimant(
    prefix: Prefix, replica: Replica, replicas: Collection[Replica], waiting: Collection[RequestGroup]
) -> RequestGroup | None:
    """Returns a request that was accepted and would have no home any more if the replica kept the prefix; None if there
    is none."""
    ready_others = [other for other in replicas if other is not replica and other.is_ready]
    for group in waiting:
        if (
            has_capacity(group.request, replica)
            and not _still_fits(group, replica, prefix)
            and not any(has_capacity(group.request, other) for other in ready_others)
        ):
            return group
    return next((group for group in replica.requests if not _still_fits(group, replica, prefix)), None)


def _still_fits(group: RequestGroup, replica: Replica, prefix: Prefix) -> bool:
    kv = replica.kv
    needed = worst_case_blocks(group.request, replica) + kv.blocks_for(len(prefix.token_ids))
    return needed <= kv.num_usable


def making_way_for(group: RequestGroup) -> str:
    """Says why a replica is without a prefix for a while."""
    return f"request {group.request_id}, which no other worker can hold, may need its blocks; it is computed after that"
