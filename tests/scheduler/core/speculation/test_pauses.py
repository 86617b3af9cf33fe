"""What is tried in vain is tried again after twice as long each time; what pays is tried again soon."""

from octavo.scheduler.core.speculation.pauses import Pause


def occasions(pause: Pause, count: int) -> list[int]:
    """Returns which of so many occasions are used."""
    used = []
    for number in range(1, count + 1):
        if pause.is_over():
            pause.was_used()
            used.append(number)
    return used


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    assert occasions(Pause(2, 11), 60) == [2, 6, 14, 25, 36, 47, 58]


def test_an_occasion_that_was_not_used_is_offered_again() -> None:
    pause = Pause(3, 12)
    assert [pause.is_over() for _ in range(5)] == [False, False, True, True, True]
    pause.was_used()
    assert occasions(pause, 6) == [6]


def test_what_has_paid_is_tried_again_soon() -> None:
    pause = Pause(2, 64)
    occasions(pause, 40)
    pause.paid()
    assert occasions(pause, 10) == [2, 6]
