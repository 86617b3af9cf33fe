"""Prefixes kept computed under a name (paper §4.4): which there are, and the requests that compute them."""

from collections.abc import Collection, Iterable

from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup, new_sequences
from octavo.wire.requests import MAX_PREFIXES, NO_CACHE_KEY, Prefix, Request
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import ModelInfo


class PrefixPins:
    """All that is pinned, by name. Every replica computes each prefix once, as far as its budget goes."""

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
        groups: Iterable[SequenceGroup],
    ) -> str | None:
        """Why the prefix cannot be pinned, if it cannot."""
        if prefix.name in self._prefixes:
            return f"a prefix named {prefix.name!r} is pinned already; unpin it first, or choose another name"
        if len(self._prefixes) >= MAX_PREFIXES:
            return f"{MAX_PREFIXES} prefixes are pinned, which is the limit; unpin one first"
        if model and (refusal := _model_refusal(prefix, model)):
            return refusal
        for replica in replicas:
            if refusal := self._budget_refusal(prefix, replica):
                return refusal
        # Those that wait while there is no replica wait for one that is large enough.
        for group in groups if replicas else ():
            if not any(_still_fits(group, replica, prefix) for replica in _homes(group, replicas)):
                return f"request {group.request_id} may need the blocks before it ends; try again later"
        return None

    def _budget_refusal(self, prefix: Prefix, replica: Replica) -> str | None:
        blocks, budget = replica.kv.blocks_for(len(prefix.token_ids)), replica.pinned_budget
        taken = replica.kv.reserved_blocks
        if taken + blocks <= budget:
            return None
        return (
            f"the prefix takes {blocks} blocks of worker {replica.hello.worker_id}, whose budget for pinned prefixes is"
            f" {budget} of {replica.kv.num_blocks} blocks with {taken} taken; shorten it, unpin another, or raise"
            " --max-pinned-share"
        )

    def pin(self, prefix: Prefix, replicas: Iterable[Replica]) -> None:
        """Every replica will compute the prefix before anything else that is new to it."""
        self._prefixes[prefix.name] = prefix
        for replica in replicas:
            self._add(prefix, replica)

    def unpin(self, name: str, replicas: Iterable[Replica]) -> None:
        """The prefix is ordinary cached content from now on. Raises `KeyError` for an unknown name."""
        for replica in replicas:
            if name in replica.prefix_names:
                self.give_up(name, replica)
        del self._prefixes[name]

    def give_up(self, name: str, replica: Replica) -> None:
        """The replica, which has or was to have the prefix, goes on without it."""
        replica.prefix_names.remove(name)
        replica.kv.reserved_blocks -= replica.kv.blocks_for(len(self._prefixes[name].token_ids))
        if name in replica.kv.pins:
            replica.kv.pins.unpin(name)
        for group in [group for group in replica.running if group.prefix_name == name]:
            replica.drop(group)
        replica.prefixes = [group for group in replica.prefixes if group.prefix_name != name]

    def equip(self, replica: Replica) -> None:
        """A replica has joined: it computes what fits its budget, in the order of pinning."""
        for prefix in self._prefixes.values():
            # It may have been pinned before any worker had said what it serves.
            if not (_model_refusal(prefix, replica.hello.model) or self._budget_refusal(prefix, replica)):
                self._add(prefix, replica)

    def _add(self, prefix: Prefix, replica: Replica) -> None:
        replica.prefix_names.add(prefix.name)
        replica.kv.reserved_blocks += replica.kv.blocks_for(len(prefix.token_ids))
        replica.prefixes.append(self._group(prefix, replica))

    def _group(self, prefix: Prefix, replica: Replica) -> SequenceGroup:
        self._count += 1
        request = Request(
            request_id=f"prefix {prefix.name}",
            attempt=self._count,
            resubmitted=False,
            model_fingerprint=replica.hello.model.fingerprint,
            prompt_token_ids=prefix.token_ids,
            generated=[],
            # Its one token is thrown away: what is wanted is the KV of its prompt.
            sampling=SamplingParams(max_tokens=1),
            priority=0,
            tenant="",
            cache_key=NO_CACHE_KEY,
            age_ms=0,
        )
        sequences = new_sequences(request)
        sequences[0].is_prefix = True
        order = (float("-inf"), self._count)
        return SequenceGroup(request, None, float("-inf"), order, sequences, prefix_name=prefix.name)


def _model_refusal(prefix: Prefix, model: ModelInfo) -> str | None:
    if len(prefix.token_ids) + 1 >= model.max_model_len:
        return f"{len(prefix.token_ids)} tokens leave no room in the context of {model.max_model_len}"
    if max(prefix.token_ids) >= model.vocab_size:
        return f"a token id is outside the vocabulary of {model.vocab_size}"
    return None


def _homes(group: SequenceGroup, replicas: Collection[Replica]) -> Collection[Replica]:
    """Where a group can go on: where it runs or is swapped out, or anywhere."""
    at_home = [replica for replica in replicas if group in replica.running or group in replica.swapped]
    return at_home or replicas


def _still_fits(group: SequenceGroup, replica: Replica, prefix: Prefix) -> bool:
    kv = replica.kv
    worst_case = group.request.sampling.parallel * kv.blocks_for(group.longest)
    return worst_case + kv.blocks_for(len(prefix.token_ids)) <= kv.num_blocks - kv.reserved_blocks
