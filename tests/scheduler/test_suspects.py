"""Whom the deaths of workers accuse, make a suspect and find guilty, and what clears of it."""

from octavo.scheduler.replica import OutstandingStep
from octavo.scheduler.sequence import SequenceGroup, SequenceStatus, new_sequences
from octavo.scheduler.suspects import STEPS_TO_CLEAR, Suspects
from octavo.testing.cluster import FRONTEND, make_request


def make_group(name: str, prefix_name: str | None = None) -> SequenceGroup:
    request = make_request(name, 4, 4)
    return SequenceGroup(request, FRONTEND, 0.0, (0.0, 0), new_sequences(request), prefix_name=prefix_name)


def step(*groups: SequenceGroup, choosing: bool = True) -> OutstandingStep:
    samplers = [(group, group.sequences[0]) for group in groups if choosing]
    return OutstandingStep(1, list(groups), [], [], samplers, [], len(groups), prefills=False, sent_at=0.0)


def accused(*groups: SequenceGroup) -> Suspects:
    """Two workers have died over each of these together."""
    suspects = Suspects()
    assert suspects.died([step(*groups)]) is None
    assert suspects.died([step(*groups)]) is None
    return suspects


A, B = make_group("a"), make_group("b")


def test_a_process_that_comes_back_takes_back_what_it_accused() -> None:
    suspects = Suspects()
    suspects.died([step(A)], process=1)
    suspects.died([step(A, B)], process=2)
    assert list(suspects) == [A]
    suspects.absolve(3)
    assert list(suspects) == [A]
    suspects.absolve(1)
    assert list(suspects) == []
    suspects.died([step(A, B)])
    assert list(suspects) == [A, B]


def test_the_second_death_makes_a_suspect_of_all_that_were_computed() -> None:
    suspects = Suspects()
    suspects.died([step(A), step(A, B)])
    assert list(suspects) == []
    suspects.died([step(A)])
    assert list(suspects) == [A]
    assert A in suspects
    assert B not in suspects


def test_two_steps_are_one_death() -> None:
    suspects = Suspects()
    suspects.died([step(A, B), step(A, B)])
    assert list(suspects) == []


def test_a_suspect_that_was_alone_is_guilty() -> None:
    assert accused(A, B).died([step(A), step(A)]) is A


def test_a_suspect_beside_another_is_not_found_guilty() -> None:
    assert accused(A, B).died([step(A), step(B)]) is None


def test_one_that_was_alone_but_is_no_suspect_yet_is_not_found_guilty() -> None:
    suspects = Suspects()
    assert suspects.died([step(A)]) is None
    assert suspects.died([step(A)]) is None
    assert suspects.died([step(A)]) is A


def test_a_death_over_nothing_accuses_nobody() -> None:
    suspects = accused(A)
    assert suspects.died([]) is None
    assert list(suspects) == [A]


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
    suspects = Suspects()
    suspects.died([step(A, B)])
    for _ in range(STEPS_TO_CLEAR - 1):
        suspects.computed(step(A))
    suspects.died([step(A, B)])
    suspects.computed(step(A))
    assert A in suspects


def test_one_that_is_cleared_starts_with_a_clean_record() -> None:
    suspects = accused(A)
    for _ in range(STEPS_TO_CLEAR):
        suspects.computed(step(A))
    assert suspects.died([step(A)]) is None
    assert A not in suspects


def test_prefixes_and_what_has_ended_are_never_accused() -> None:
    prefix, ended = make_group("p", prefix_name="p"), make_group("e")
    ended.sequences[0].leave(SequenceStatus.FINISHED)
    assert list(accused(prefix, ended)) == []


def test_a_prefix_beside_it_makes_the_guilt_of_a_suspect_uncertain() -> None:
    assert accused(A).died([step(A, make_group("p", prefix_name="p"))]) is None


def test_one_that_has_ended_is_forgotten() -> None:
    suspects = accused(A)
    suspects.forget(A)
    assert list(suspects) == []
    assert suspects.died([step(A)]) is None
