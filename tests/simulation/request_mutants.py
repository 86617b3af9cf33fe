"""Safeguards around requests, their tokens and their blocks, taken out one by one.

Not every safeguard shows alone: epochs and attempts at the frontend, and incarnations at the worker, stand behind one
another and behind the history's hash; and parked blocks, but for those that leave a window, behind the order of plans.
"""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from octavo.frontend.scheduler.journal import Journal, SequenceJournal
from octavo.frontend.scheduler.session import LiveRequest, SchedulerSession
from octavo.scheduler.core.frontends import FrontendLeases
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step import results
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import PrefixCache
from octavo.wire.requests import Lease, Request
from octavo.wire.steps import BlockMove, StepResult
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import StepOutput
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import WorkItem

Patch = pytest.MonkeyPatch


def a_frontend_accepts_tokens_of_any_history(patch: Patch) -> None:
    patch.setattr(SequenceJournal, "continues", lambda self, delta: True)


def a_frontend_submits_again_from_the_start(patch: Patch) -> None:
    patch.setattr(Journal, "_generated", lambda self: [])


def a_frontend_never_submits_again(patch: Patch) -> None:
    patch.setattr(SchedulerSession, "_resubmit_if_current", lambda self, lease, now: [])


def no_lease_ends(patch: Patch) -> None:
    patch.setattr(FrontendLeases, "lose", lambda self, frontend_id: None)


def neither_aborts_nor_renewals_end_a_request(patch: Patch) -> None:
    def let_go(self: SchedulerSession, request: LiveRequest) -> list[Any]:
        self.live.pop(request.journal.request_id, None)
        return []

    renew = FrontendLeases.renew

    def keep(self: FrontendLeases, frontend_id: int, live: list[Lease], now: float) -> None:
        groups = self._state.requests.held[frontend_id].values()
        held = [Lease(group.request_id, group.request.attempt) for group in groups]
        renew(self, frontend_id, live + held, now)

    patch.setattr(SchedulerSession, "release", let_go)
    patch.setattr(FrontendLeases, "renew", keep)


def any_result_answers_the_oldest_step(patch: Patch) -> None:
    take = results.take

    def unfenced(state: SchedulerState, replica: Replica, result: StepResult, now: float) -> None:
        if replica.outstanding:
            oldest = replica.outstanding[0].step_id
            take(state, replica, msgspec.structs.replace(result, step_id=oldest), now)

    patch.setattr(results, "take", unfenced)


def a_submission_does_not_replace_the_one_before(patch: Patch) -> None:
    submit = FrontendLeases.submit

    def add(self: FrontendLeases, frontend_id: int, request: Request, now: float) -> None:
        self._state.requests.held[frontend_id].pop(request.request_id, None)
        submit(self, frontend_id, request, now)

    patch.setattr(FrontendLeases, "submit", add)


def an_abort_leaks_blocks(patch: Patch) -> None:
    def leak(self: Replica, group: SequenceGroup) -> None:
        self._take_out(group)
        for sequence in group.live:
            sequence.leave(SequenceStatus.FINISHED)

    patch.setattr(Replica, "drop", leak)


def shared_blocks_are_written_to(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_copy_on_write", lambda self, sequence, group, index, growth: None)


def swapped_blocks_do_not_come_back(patch: Patch) -> None:
    swap_in = Replica.swap_in

    def lose(self: Replica, group: RequestGroup) -> list[BlockMove]:
        swap_in(self, group)
        return []

    patch.setattr(Replica, "swap_in", lose)


def a_window_frees_blocks_that_the_step_still_reads(patch: Patch) -> None:
    slide = KVCacheManager.slide

    def at_once(self: KVCacheManager, sequence: Sequence, step_id: int) -> None:
        slide(self, sequence, step_id)
        self.blocks.release(self.blocks.parked.pop(step_id, []))

    patch.setattr(KVCacheManager, "slide", at_once)


def what_a_failed_step_wrote_is_shared(patch: Patch) -> None:
    answered = PrefixCache.step_answered
    patch.setattr(PrefixCache, "step_answered", lambda self, step_id, *, valid: answered(self, step_id, valid=True))


def a_spoiled_sequence_is_computed_on(patch: Patch) -> None:
    complete = SequenceTable.complete

    def keep(self: SequenceTable, items: list[WorkItem], output: StepOutput) -> None:
        complete(self, items, replace(output, failed=[]))

    patch.setattr(SequenceTable, "complete", keep)


def workers_go_on_after_a_failed_step(patch: Patch) -> None:
    never = property(lambda self: 0, lambda self, step_id: None)
    patch.setattr(WorkerProtocol, "_failed_step_id", never, raising=False)


def workers_keep_their_incarnation(patch: Patch) -> None:
    reset = WorkerProtocol.reset

    def keep(self: WorkerProtocol) -> None:
        incarnation = self.incarnation
        reset(self)
        self.incarnation = incarnation

    patch.setattr(WorkerProtocol, "reset", keep)


def workers_keep_their_sequences(patch: Patch) -> None:
    def keep(self: WorkerProtocol) -> None:
        self.incarnation, self.epoch, self.last_step_id = self._draw_incarnation(), None, 0

    patch.setattr(WorkerProtocol, "reset", keep)
