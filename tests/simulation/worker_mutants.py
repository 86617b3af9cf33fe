"""Safeguards around workers that come and go, and around what they die over, taken out one by one.

Not here, for nothing wrong comes of it: that a request is suspected after one death and not after two, or cleared after
fewer steps (it runs alone more often, or once more in company); that nothing is moved from a worker that is drained
(its requests end there, or its own patience does, which is another way to end it well).
"""

import msgspec

from octavo.scheduler.core import workers
from octavo.scheduler.core.faults import isolation
from octavo.scheduler.core.faults.poison import PoisonDetector, Quarantine
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step import outputs as results
from octavo.scheduler.core.step import results as answers
from octavo.scheduler.core.steps_in_flight import OutstandingStep, StepSize
from octavo.scheduler.server import loop as shell
from octavo.scheduler.server.loop import SchedulerShell
from octavo.wire.requests import NoticeKind
from octavo.wire.steps import StepOutcome, StepResult
from octavo.worker.loop import WorkerLoop

from .request_mutants import Patch

# -- workers that come and go ---------------------------------------------------------------------------------------


def closed_workers_get_requests(patch: Patch) -> None:
    patch.setattr(Replica, "is_ready", property(lambda self: True))


def a_worker_is_let_go_with_requests(patch: Patch) -> None:
    patch.setattr(workers, "_is_done", lambda state, replica: True)


def a_worker_is_let_go_in_a_step(patch: Patch) -> None:
    see_off = workers._see_off

    def at_once(state: SchedulerState, replica: Replica, now: float, *, is_over: bool) -> None:
        if workers._is_done(state, replica):
            workers.dismiss(state, replica)
        else:
            see_off(state, replica, now, is_over=is_over)

    patch.setattr(workers, "_see_off", at_once)


def a_drain_is_told_as_a_loss(patch: Patch) -> None:
    def move(state: SchedulerState, replica: Replica, group: RequestGroup) -> None:
        replica.evict(group)
        state.requests.requeue(group, NoticeKind.WORKER_LOST)

    patch.setattr(workers, "_move", move)


def a_cordon_ends_with_the_registration(patch: Patch) -> None:
    cordon = workers.cordon

    def briefly(state: SchedulerState, worker_id: str) -> None:
        cordon(state, worker_id)
        state.replica_table.cordoned.clear()

    patch.setattr(workers, "cordon", briefly)


def a_worker_given_up_comes_back(patch: Patch) -> None:
    patch.setattr(ReplicaTable, "remove", lambda self, replica_id: self.replicas.pop(replica_id))


def nobody_looks_who_has_gone(patch: Patch) -> None:
    patch.setattr(SchedulerShell, "_look_for_departed", lambda self, now: None)


def workers_end_when_they_are_asked_to(patch: Patch) -> None:
    patch.setattr(WorkerLoop, "_is_over", lambda self: self._stop.requested or self._protocol.dismissed)


def any_schema_is_welcome(patch: Patch) -> None:
    patch.setattr(shell, "refusal", lambda kind, version: None)
    patch.setattr(shell, "refusal_of_newer", lambda frame: None)


# -- what workers die over ------------------------------------------------------------------------------------------


def nobody_is_suspected(patch: Patch) -> None:
    patch.setattr(PoisonDetector, "died", lambda self, steps, death: None)


def whoever_is_there_is_guilty(patch: Patch) -> None:
    patch.setattr(PoisonDetector, "guilty", lambda self: list(self._records))


def deaths_are_forgotten(patch: Patch) -> None:
    requeue = RequestTable.requeue

    def forgive(self: RequestTable, group: RequestGroup, why: NoticeKind) -> None:
        self.suspects.forget(group)
        requeue(self, group, why)

    patch.setattr(RequestTable, "requeue", forgive)


def suspects_run_in_company(patch: Patch) -> None:
    patch.setattr(Replica, "stepping", property(lambda self: self.running))


def suspects_wait_for_ever(patch: Patch) -> None:
    patch.setattr(isolation, "upcoming", lambda state: None)


def nothing_is_quarantined(patch: Patch) -> None:
    patch.setattr(Quarantine, "add", lambda self, request, now, why: None)


def steps_stay_large(patch: Patch) -> None:
    patch.setattr(StepSize, "ran_out", lambda self, num_tokens, num_seqs: None)


def want_of_memory_is_a_failure(patch: Patch) -> None:
    fail = answers._fail_step

    def blame(replica: Replica, step: OutstandingStep, result: StepResult) -> None:
        if result.outcome is StepOutcome.OUT_OF_MEMORY:
            result = msgspec.structs.replace(result, outcome=StepOutcome.FAILED)
        fail(replica, step, result)

    patch.setattr(answers, "_fail_step", blame)


def a_broken_device_is_its_requests_fault(patch: Patch) -> None:
    patch.setattr(results, "is_non_finite", lambda replica, step, failures: False)
