"""A replica's next step, planned on a copy of its books: what would be done, by those who will do it."""

import copy
from dataclasses import dataclass

from octavo.scheduler.draft import Draft
from octavo.scheduler.replica import Replica
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import SequenceGroup


@dataclass(frozen=True)
class Rehearsal:
    """The step as what runs on the replica, or is swapped out there, leaves it to those that wait. `stands`: whether it
    is planned at all before outstanding steps are answered."""

    draft: Draft
    stands: bool
    _copies: dict[int, object]

    @property
    def preempts(self) -> bool:
        """Whether something loses its blocks in the step, or in one as soon as outstanding steps are answered."""
        return self.draft.has_preempted or not self.stands

    def double(self, group: SequenceGroup) -> SequenceGroup:
        """The copy of a group that is on the replica."""
        double = self._copies[id(group)]
        assert isinstance(double, SequenceGroup)
        return double


def rehearse(core: Scheduler, replica: Replica, head: SequenceGroup | None, now: float) -> Rehearsal:
    """Plans the step; `head` is the first of the waiting queue. Copying takes some ten microseconds for each sequence
    that is there, so this is for those who ask, not for every step."""
    copies: dict[int, object] = {id(part): part for part in _unchanged(replica)}
    draft = core.draft(copy.deepcopy(replica, copies))
    return Rehearsal(draft, core.policy.begin(draft, head, now), copies)


def _unchanged(replica: Replica) -> list[object]:
    """What planning reads and leaves as it is: most of what there is."""
    found: list[object] = [replica.hello, replica.config, replica.stats, replica.outstanding]
    if replica.suspect is not None and not replica.isolates:
        found.append(replica.suspect)
    for group in (*replica.running, *replica.swapped, *replica.prefixes):
        found += [group.request, group.sampling, group.stop_token_ids, group.search, group.prompt_logprobs]
        for sequence in group.sequences:
            found += [sequence.prompt_token_ids, sequence.generated_token_ids, sequence.block_hashes]
            found.append(sequence.candidates)
    return found
