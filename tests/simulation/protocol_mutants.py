"""All safeguards that are taken out, each with the runs in which that is to show."""

from collections.abc import Callable

from octavo.testing.simulation import faults
from octavo.testing.simulation.faults import Fault
from octavo.testing.simulation.scenario import Scenario
from octavo.wire.base import MAX_SEQUENCES

from . import draft_mutants, request_mutants, worker_mutants
from .request_mutants import Patch

Mutant = Callable[[Patch], None]
# Whether a mutant is to show in a run.
Need = Callable[[Scenario], bool]


def anywhere(scenario: Scenario) -> bool:
    """In any run."""
    return True


def poisoned(scenario: Scenario) -> bool:
    """Where a prompt is the end of workers, and nothing else is."""
    return not scenario.faults and any(fault.kind != "nan" for fault in scenario.poisons)


def short_of_memory(scenario: Scenario) -> bool:
    """Where steps can be too large for any worker."""
    return all(hardware.most_sequences < MAX_SEQUENCES for hardware in scenario.workers)


def gently(fault: Fault) -> Need:
    """Where this happens, and nothing worse than an operator does."""
    return lambda scenario: scenario.is_gentle and struck_by(fault)(scenario)


def struck_by(fault: Fault) -> Need:
    """Where this goes wrong."""
    return lambda scenario: any(each is fault for _, each in scenario.faults)


def guessing(scenario: Scenario) -> bool:
    """Where there is a guess for nearly every token, right or wrong."""
    return scenario.guesses_wildly and scenario.config.speculation not in ("auto", "off")


MUTANTS: list[tuple[Mutant, Need]] = [
    (request_mutants.a_frontend_accepts_tokens_of_any_history, struck_by(faults.noise)),
    (request_mutants.a_frontend_submits_again_from_the_start, struck_by(faults.kill_scheduler)),
    (request_mutants.a_frontend_never_submits_again, struck_by(faults.kill_scheduler)),
    (request_mutants.no_lease_ends, struck_by(faults.kill_frontend)),
    (request_mutants.neither_aborts_nor_renewals_end_a_request, anywhere),
    (request_mutants.any_result_answers_the_oldest_step, struck_by(faults.noise)),
    (request_mutants.a_submission_does_not_replace_the_one_before, struck_by(faults.noise)),
    (request_mutants.an_abort_leaks_blocks, anywhere),
    (request_mutants.shared_blocks_are_written_to, anywhere),
    (request_mutants.swapped_blocks_do_not_come_back, anywhere),
    (request_mutants.a_window_frees_blocks_that_the_step_still_reads, anywhere),
    (request_mutants.what_a_failed_step_wrote_is_shared, struck_by(faults.fail_steps)),
    (request_mutants.a_spoiled_sequence_is_computed_on, struck_by(faults.spoil_sequences)),
    (request_mutants.workers_go_on_after_a_failed_step, struck_by(faults.fail_steps)),
    (request_mutants.workers_keep_their_incarnation, struck_by(faults.reset)),
    (request_mutants.workers_keep_their_sequences, struck_by(faults.reset)),
    (worker_mutants.closed_workers_get_requests, struck_by(faults.cordon_worker)),
    (worker_mutants.a_worker_is_let_go_with_requests, struck_by(faults.drain_worker)),
    (worker_mutants.a_worker_is_let_go_in_a_step, struck_by(faults.drain_worker)),
    (worker_mutants.a_drain_is_told_as_a_loss, gently(faults.drain_worker)),
    (worker_mutants.a_cordon_ends_with_the_registration, struck_by(faults.cordon_worker)),
    (worker_mutants.a_worker_given_up_comes_back, struck_by(faults.slow_link)),
    (worker_mutants.nobody_looks_who_has_gone, struck_by(faults.kill_worker)),
    (worker_mutants.workers_end_when_they_are_asked_to, struck_by(faults.terminate_worker)),
    (worker_mutants.any_schema_is_welcome, struck_by(faults.upgrade_worker)),
    (worker_mutants.nobody_is_suspected, poisoned),
    (worker_mutants.whoever_is_there_is_guilty, poisoned),
    (worker_mutants.deaths_are_forgotten, poisoned),
    (worker_mutants.suspects_run_in_company, poisoned),
    (worker_mutants.suspects_wait_for_ever, poisoned),
    (worker_mutants.nothing_is_quarantined, poisoned),
    (worker_mutants.steps_stay_large, short_of_memory),
    (worker_mutants.want_of_memory_is_a_failure, short_of_memory),
    (worker_mutants.a_broken_device_is_its_requests_fault, struck_by(faults.break_device)),
    (draft_mutants.wrong_guesses_keep_their_blocks, guessing),
    (draft_mutants.workers_keep_the_blocks_of_wrong_guesses, guessing),
    (draft_mutants.workers_compute_right_guesses_again, guessing),
    (draft_mutants.guesses_are_taken_unchecked, guessing),
    (draft_mutants.guesses_go_on_past_the_end, guessing),
    (draft_mutants.right_guesses_do_not_count_as_computed, guessing),
    (draft_mutants.guesses_take_what_decodes_need, guessing),
    (draft_mutants.guesses_take_any_row, guessing),
    (draft_mutants.anything_is_guessed_that_a_client_says, guessing),
]
