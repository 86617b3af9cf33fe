"""Safeguards around drafts, taken out one by one.

Not here, for no run can show it: that an answer which contradicts its draft makes a replica confused (no worker of the
simulation gives one), that a worker waits for a draft before it goes on with the sequence (no scheduler asks it to),
and that suspects have no guesses (a poison strikes with them or without).
"""

from typing import Any

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, Sequence
from octavo.scheduler.core.speculation import speculation
from octavo.scheduler.core.speculation.speculation import Room
from octavo.scheduler.core.step import outputs
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import FurtherTokens, Remap
from octavo.worker.fake.runner import FakeChoices, FakeRunner
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import Chooser, WorkerSequence, WorkItem

from .request_mutants import Patch


def wrong_guesses_keep_their_blocks(patch: Patch) -> None:
    def keep(self: KVCacheManager, sequence: Sequence) -> list[Remap]:
        return []

    patch.setattr(KVCacheManager, "confirm", keep)


def workers_keep_the_blocks_of_wrong_guesses(patch: Patch) -> None:
    def keep(self: SequenceTable, sequence: WorkerSequence, further: list[int]) -> None:
        sequence.is_drafted = False
        sequence.token_ids += further
        self._advance(sequence, sequence.num_computed + len(further))

    patch.setattr(SequenceTable, "_confirm", keep)


def workers_compute_right_guesses_again(patch: Patch) -> None:
    confirm = SequenceTable._confirm

    def forget(self: SequenceTable, sequence: WorkerSequence, further: list[int]) -> None:
        before = sequence.num_computed
        confirm(self, sequence, further)
        sequence.num_computed = before

    patch.setattr(SequenceTable, "_confirm", forget)


def guesses_are_taken_unchecked(patch: Patch) -> None:
    def take(self: FakeRunner, item: WorkItem, sequence: WorkerSequence, chosen: FakeChoices) -> None:
        tokens = [self._sampled(item, Chooser(sequence, item.draft, place)) for place in range(len(item.draft) + 1)]
        first, *further = tokens
        if not further:
            chosen.sampled.append(first)
            return
        token_ids = [*item.draft, tokens[-1].token_id]
        logprobs = [each.logprobs for each in further if each.logprobs]
        chosen.sampled.append(type(first)(first.sequence_id, token_ids[0], first.logprobs))
        chosen.further.append(FurtherTokens(sequence.sequence_id, token_ids[1:], logprobs))

    patch.setattr(FakeRunner, "_sample", take)


def guesses_go_on_past_the_end(patch: Patch) -> None:
    def append_all(
        group: RequestGroup, sequence: Sequence, answer: FurtherTokens, token_ids: list[int], logprobs: list[Logprobs]
    ) -> Any:
        for token_id in answer.token_ids:
            sequence.append(token_id)
            token_ids.append(token_id)
        logprobs += answer.logprobs
        return group.finish_reason(sequence)

    patch.setattr(outputs, "_append_further", append_all)


def right_guesses_do_not_count_as_computed(patch: Patch) -> None:
    settle = outputs._settle_draft

    def settle_one(replica: Replica, sequence: Sequence, num_right: int, num_tokens: int, outcome: Any) -> None:
        settle(replica, sequence, num_right, num_tokens, outcome)
        sequence.placement.num_computed -= num_tokens - 1

    patch.setattr(outputs, "_settle_draft", settle_one)


def guesses_take_what_decodes_need(patch: Patch) -> None:
    def all_there_is(replica: Replica, decodes: list[Any], num_ready: int, room: Room) -> Room:
        return Room(room.rows, replica.kv.num_free, room.grammar_us)

    patch.setattr(speculation, "_left", all_there_is)


def guesses_take_any_row(patch: Patch) -> None:
    left = speculation._left

    def boundless(replica: Replica, decodes: list[Any], num_ready: int, room: Room) -> Room:
        found = left(replica, decodes, num_ready, room)
        return Room(1 << 20, found.blocks, found.grammar_us)

    patch.setattr(speculation, "_left", boundless)


def anything_is_guessed_that_a_client_says(patch: Patch) -> None:
    patch.setattr(speculation, "_num_sound", lambda token_ids, vocab_size: len(token_ids))
