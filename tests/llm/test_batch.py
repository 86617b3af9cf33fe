"""Many calls at once."""

import threading

import pytest

from octavo.llm.llm import MAX_AT_ONCE, run_all


def test_answers_come_in_the_order_of_their_prompts() -> None:
    first = threading.Event()

    def call(item: int) -> int:
        # The first is done last.
        if item == 0:
            first.wait(60)
        elif item == 3:
            first.set()
        return item * 2

    assert run_all(call, [0, 1, 2, 3], shows_progress=False, give_up=list) == [0, 2, 4, 6]


def test_no_more_run_at_once_than_there_may() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def call(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
        return item

    items = list(range(3 * MAX_AT_ONCE))
    assert run_all(call, items, shows_progress=False, give_up=list) == items
    assert most <= MAX_AT_ONCE


def test_the_first_error_ends_the_others() -> None:
    given_up = threading.Event()

    def call(item: int) -> int:
        if item == 1:
            raise RuntimeError("this one")
        assert given_up.wait(60), "it was left to run"
        return item

    with pytest.raises(RuntimeError, match="this one"):
        run_all(call, [0, 1, 2], shows_progress=False, give_up=given_up.set)


def test_the_bar_counts_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(str, range(5), shows_progress=True, give_up=list) == ["0", "1", "2", "3", "4"]
    assert "5/5" in capsys.readouterr().err


def test_nothing_is_asked_of_nobody() -> None:
    assert run_all(str, [], shows_progress=True, give_up=list) == []
