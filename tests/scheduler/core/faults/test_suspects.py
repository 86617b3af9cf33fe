"""Whom the deaths of workers accuse, make a suspect and find guilty, and what clears of it."""

import pytest

from octavo.scheduler.core.faults.poison import (
    DEATHS_TO_CONVICT,
    STEPS_TO_CLEAR,
    UNEXPLAINED_TO_CONVICT,
    Death,
    PoisonDetector,
    Verdict,
)
from octavo.scheduler.core.sequence import PrefixGroup, RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.testing.cluster import FRONTEND, make_request
from octavo.wire.steps import Ending, Predecessor


def make_group(name: str) -> RequestGroup:
    return RequestGroup(make_request(name, 4, 4), 0.0, (0.0, 0), frontend_id=FRONTEND)


def make_prefix(name: str) -> PrefixGroup:
    return PrefixGroup(make_request(name, 4, 4), 0.0, (0.0, 0), prefix_name=name)


def step(*groups: SequenceGroup, choosing: bool = True) -> OutstandingStep:
    samplers: list[tuple[SequenceGroup, Sequence]] = [(group, group.sequences[0]) for group in groups if choosing]
    return OutstandingStep(1, list(groups), [], [], samplers, [], len(groups), prefills=False, sent_at=0.0)


def crash(suspects: PoisonDetector, *steps: OutstandingStep, worker_id: str = "w", process: int = 0) -> None:
    """A worker dies with these steps outstanding, and nobody doubts of what."""
    suspects.died(steps, Death(worker_id, process, 0.0, "signal SIGSEGV", Verdict.CRASHED))


def vanish(suspects: PoisonDetector, *steps: OutstandingStep, worker_id: str = "w", process: int = 0) -> None:
    """A worker's connection ends."""
    suspects.died(steps, Death(worker_id, process, 0.0, "its connection has ended"))


def accused(*groups: SequenceGroup) -> PoisonDetector:
    """Two workers have died over each of these together."""
    suspects = PoisonDetector()
    crash(suspects, step(*groups))
    crash(suspects, step(*groups))
    assert suspects.guilty() == []
    return suspects


A, B = make_group("a"), make_group("b")


def test_a_process_that_comes_back_takes_back_what_it_accused() -> None:
    suspects = PoisonDetector()
    vanish(suspects, step(A), process=1)
    vanish(suspects, step(A, B), process=2, worker_id="v")
    assert list(suspects) == [A]
    suspects.came_back("u", 3, None)
    assert list(suspects) == [A]
    suspects.came_back("w", 1, None)
    assert list(suspects) == []
    crash(suspects, step(A, B))
    assert list(suspects) == [A, B]


class TestHowAWorkerDied:
    """As the next of its name tells; until then it may have been anybody's doing."""

    @pytest.mark.parametrize("ending", [Ending.KILLED, Ending.CRASHED, Ending.UNKNOWN, None])
    def test_decides_who_is_accused_and_found_guilty(self, ending: Ending | None) -> None:
        suspects = PoisonDetector()
        for process in range(1, DEATHS_TO_CONVICT + 1):
            vanish(suspects, step(A), process=process)
            assert suspects.guilty() == []
            told = Predecessor(process, ending, "as it was") if ending else None
            suspects.came_back("w", 100 + process, told)
        assert (A in suspects) is (ending is not Ending.KILLED)
        assert suspects.guilty() == ([A] if ending is Ending.CRASHED else [])

    def test_is_awaited_by_a_suspect_that_was_alone(self) -> None:
        suspects = accused(A, B)
        vanish(suspects, step(A), process=5)
        assert suspects.awaits_word(A)
        assert not suspects.awaits_word(B)
        suspects.came_back("w", 6, Predecessor(5, Ending.KILLED, "signal SIGKILL"))
        assert not suspects.awaits_word(A)
        assert suspects.guilty() == []

    def test_is_awaited_by_nobody_else(self) -> None:
        suspects = PoisonDetector()
        vanish(suspects, step(A), process=5)
        vanish(suspects, step(A), process=6)
        assert not suspects.awaits_word(A)
        vanish(suspects, step(A, B), process=7)
        assert not suspects.awaits_word(A)

    def test_is_awaited_of_the_first_where_the_last_is_known_sooner(self) -> None:
        suspects = PoisonDetector()
        vanish(suspects, step(A), process=1, worker_id="u")
        vanish(suspects, step(A), process=2, worker_id="v")
        suspects.goes_to(A, "w")
        vanish(suspects, step(A), process=3, worker_id="w")
        suspects.came_back("w", 103, Predecessor(3, Ending.CRASHED, "signal SIGSEGV"))
        assert suspects.guilty() == []
        assert suspects.awaits_word(A)
        suspects.came_back("u", 101, Predecessor(1, Ending.CRASHED, "signal SIGSEGV"))
        assert suspects.guilty() == [A]

    def test_is_unexplained_once_nobody_has_said_it_in_time(self) -> None:
        suspects = accused(A)
        suspects.died([step(A)], Death("w", 5, 10.0, "its connection has ended"))
        suspects.give_up_waiting(9.9)
        assert suspects.awaits_word(A)
        suspects.give_up_waiting(10.0)
        assert not suspects.awaits_word(A)
        assert suspects.guilty() == []
        assert A in suspects

    def test_counts_after_many_though_nobody_ever_says_it(self) -> None:
        suspects = PoisonDetector()
        for process in range(1, UNEXPLAINED_TO_CONVICT + 1):
            assert suspects.guilty() == []
            vanish(suspects, step(A), process=process)
            suspects.came_back("w", 100 + process, Predecessor(process, Ending.UNKNOWN, "without a word"))
        assert suspects.guilty() == [A]

    def test_is_unexplained_if_it_was_killed_late_in_its_step(self) -> None:
        suspects = PoisonDetector()
        for process in (1, 2):
            suspects.died([step(A)], Death("w", process, 0.0, "gone", is_late=True))
            suspects.came_back("w", 9, Predecessor(process, Ending.KILLED, "signal SIGKILL"))
        assert A in suspects


class TestDifferentWorkers:
    def test_must_have_crashed_where_another_took_it(self) -> None:
        suspects = accused(A)
        suspects.goes_to(A, "v")
        # Its word came first, and something else had ended the other.
        crash(suspects, step(A))
        assert suspects.guilty() == []
        suspects.goes_to(A, "v")
        crash(suspects, step(A), worker_id="v")
        assert suspects.guilty() == [A]

    def test_need_not_where_no_other_took_it(self) -> None:
        suspects = accused(A)
        suspects.goes_to(A, "w")
        crash(suspects, step(A))
        assert suspects.guilty() == [A]

    def test_that_are_unexplained_do_not_stand_for_those_that_crashed(self) -> None:
        suspects = PoisonDetector()
        crash(suspects, step(A))
        crash(suspects, step(A))
        suspects.goes_to(A, "v")
        vanish(suspects, step(A), worker_id="v", process=1)
        suspects.give_up_waiting(0.0)
        assert suspects.guilty() == []


def test_the_second_death_makes_a_suspect_of_all_that_were_computed() -> None:
    suspects = PoisonDetector()
    crash(suspects, step(A), step(A, B))
    assert list(suspects) == []
    crash(suspects, step(A))
    assert list(suspects) == [A]
    assert A in suspects
    assert B not in suspects


def test_two_steps_are_one_death() -> None:
    suspects = PoisonDetector()
    crash(suspects, step(A, B), step(A, B))
    assert list(suspects) == []


def test_a_suspect_that_was_alone_is_guilty() -> None:
    suspects = accused(A, B)
    crash(suspects, step(A), step(A))
    assert suspects.guilty() == [A]


def test_a_suspect_beside_another_is_not_found_guilty() -> None:
    suspects = accused(A, B)
    crash(suspects, step(A), step(B))
    assert suspects.guilty() == []


def test_one_that_was_alone_but_is_no_suspect_yet_is_not_found_guilty() -> None:
    suspects = PoisonDetector()
    for _ in range(2):
        crash(suspects, step(A))
        assert suspects.guilty() == []
    crash(suspects, step(A))
    assert suspects.guilty() == [A]


def test_a_death_over_nothing_accuses_nobody() -> None:
    suspects = accused(A)
    crash(suspects)
    assert list(suspects) == [A]
    assert suspects.guilty() == []


def test_computing_on_clears() -> None:
    suspects = accused(A, B)
    for _ in range(STEPS_TO_CLEAR - 1):
        suspects.computed(step(A))
    assert list(suspects) == [A, B]
    suspects.computed(step(A, B))
    assert list(suspects) == [B]


def test_what_is_computed_before_the_next_token_clears_of_nothing() -> None:
    suspects = accused(A)
    for _ in range(2 * STEPS_TO_CLEAR):
        suspects.computed(step(A, choosing=False))
    assert list(suspects) == [A]


def test_a_death_takes_back_what_was_computed_since_the_last() -> None:
    suspects = PoisonDetector()
    crash(suspects, step(A, B))
    for _ in range(STEPS_TO_CLEAR - 1):
        suspects.computed(step(A))
    crash(suspects, step(A, B))
    suspects.computed(step(A))
    assert A in suspects


def test_one_that_is_cleared_starts_with_a_clean_record() -> None:
    suspects = accused(A)
    for _ in range(STEPS_TO_CLEAR):
        suspects.computed(step(A))
    crash(suspects, step(A))
    assert A not in suspects


def test_prefixes_and_what_has_ended_are_never_accused() -> None:
    prefix, ended = make_prefix("p"), make_group("e")
    ended.sequences[0].leave(SequenceStatus.FINISHED)
    assert list(accused(prefix, ended)) == []


def test_a_prefix_beside_it_makes_the_guilt_of_a_suspect_uncertain() -> None:
    suspects = accused(A)
    crash(suspects, step(A, make_prefix("p")))
    assert suspects.guilty() == []


def test_one_that_has_ended_is_forgotten() -> None:
    suspects = accused(A)
    suspects.forget(A)
    assert list(suspects) == []
    crash(suspects, step(A))
    assert suspects.guilty() == []
