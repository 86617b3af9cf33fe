"""Steps become smaller when memory runs out, and slowly larger again."""

from octavo.scheduler.core.steps_in_flight import MAX_PATIENCE, MIN_PATIENCE, StepSize


def make_size() -> StepSize:
    return StepSize(max_tokens=512, max_seqs=64, min_tokens=16)


def passed(size: StepSize, count: int) -> tuple[int, int]:
    for _ in range(count):
        size.passed()
    return size.tokens, size.seqs


def test_a_size_is_whole_at_first_and_stays_so() -> None:
    assert passed(make_size(), 2 * MIN_PATIENCE) == (512, 64)


def test_the_next_steps_are_half_of_the_one_that_ran_out() -> None:
    size = make_size()
    size.ran_out(300, 24)
    assert (size.tokens, size.seqs) == (150, 12)


def test_a_step_is_never_below_one_block_and_one_sequence() -> None:
    size = make_size()
    size.ran_out(20, 1)
    assert (size.tokens, size.seqs) == (16, 1)


def test_a_budget_below_a_block_is_left_alone() -> None:
    size = StepSize(max_tokens=8, max_seqs=4, min_tokens=16)
    size.ran_out(8, 4)
    assert (size.tokens, size.seqs) == (8, 2)


def test_a_small_step_that_runs_out_late_makes_nothing_larger() -> None:
    size = make_size()
    size.ran_out(100, 2)
    size.ran_out(400, 60)
    assert (size.tokens, size.seqs) == (50, 1)


def test_a_size_doubles_after_many_steps_up_to_the_whole() -> None:
    size = make_size()
    size.ran_out(300, 24)
    assert passed(size, MIN_PATIENCE - 1) == (150, 12)
    assert passed(size, 1) == (300, 24)
    assert passed(size, MIN_PATIENCE) == (512, 48)
    assert passed(size, MIN_PATIENCE) == (512, 64)


def test_growing_that_was_too_much_is_tried_less_and_less_often() -> None:
    size = make_size()
    patience = MIN_PATIENCE
    size.ran_out(512, 64)
    while patience < MAX_PATIENCE:
        assert passed(size, patience) == (512, 64)
        size.ran_out(512, 64)
        patience *= 2
        assert passed(size, patience - 1) == (256, 32)
        size.passed()
        size.ran_out(512, 64)
        patience *= 2


def test_shrinking_several_times_in_a_row_is_one_lesson() -> None:
    size = make_size()
    for _ in range(4):
        size.ran_out(size.tokens, size.seqs)
    assert passed(size, MIN_PATIENCE) == (64, 8)
