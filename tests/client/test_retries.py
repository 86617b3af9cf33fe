"""The state machine of one call, without a server and without a clock."""

import grpc
import pytest

from octavo.client.errors import NotFoundError, OctavoError, UnavailableError, make_error
from octavo.client.retries import Attempt, Recovery, RetryPolicy

POLICY = RetryPolicy(max_retries=2, reconnect_s=10.0, first_pause_s=1.0, longest_pause_s=3.0)
LOST = make_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")
FULL = make_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_s=0.5)
GONE = make_error(grpc.StatusCode.NOT_FOUND, "no such request", "REQUEST_NOT_FOUND")
FIRST = Attempt()


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recovery(clock: Clock, *, received: int = 0, attachable: bool = True, restartable: bool = False) -> Recovery:
    return Recovery(POLICY, clock, attachable=attachable, restartable=restartable, last_offset=received)


def test_a_refused_call_is_made_again_when_the_server_says_and_not_for_ever(clock: Clock) -> None:
    state = recovery(clock)
    assert [state.after(FULL, FIRST) for _ in range(2)] == [Attempt(False, 0.5)] * 2
    with pytest.raises(OctavoError) as raised:
        state.after(FULL, FIRST)
    assert raised.value is FULL


def test_what_the_server_does_not_invite_to_is_not_tried_again(clock: Clock) -> None:
    with pytest.raises(OctavoError, match="bad"):
        recovery(clock).after(make_error(grpc.StatusCode.INVALID_ARGUMENT, "bad", "BAD_PARAMETER"), FIRST)


def test_a_refusal_after_events_ends_a_stream_and_restarts_what_nobody_has_seen(clock: Clock) -> None:
    with pytest.raises(OctavoError, match="full"):
        recovery(clock, received=3).after(FULL, FIRST)
    state = recovery(clock, received=3, restartable=True)
    assert state.after(FULL, FIRST) == Attempt(False, 0.5)
    assert state.last_offset == 0


def test_a_lost_stream_is_looked_for_with_growing_pauses_as_long_as_it_may_be_kept(clock: Clock) -> None:
    state = recovery(clock, received=3)
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        assert state.after(LOST, Attempt(attach=True)) == Attempt(True, pause_s)
        clock.now += pause_s
    with pytest.raises(UnavailableError, match="lost after event 3") as raised:
        state.after(LOST, Attempt(attach=True))
    assert raised.value.reason == "STREAM_LOST"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_what_an_ending_server_did_not_answer_is_asked_again(clock: Clock, code: grpc.StatusCode) -> None:
    lost = make_error(code, "")
    assert recovery(clock, attachable=False).after(lost, FIRST) == Attempt(False, 1.0)
    assert recovery(clock, received=3).after(lost, FIRST) == Attempt(True, 1.0)


def test_every_event_makes_a_loss_a_new_one(clock: Clock) -> None:
    state = recovery(clock, received=3)
    for offset in range(4, 40):
        attempt = state.after(LOST, FIRST)
        assert attempt == Attempt(True, 1.0)
        clock.now += 5
        assert state.accept(offset)


def test_old_events_are_told_from_new_ones(clock: Clock) -> None:
    state = recovery(clock)
    assert [state.accept(offset) for offset in (1, 2, 2, 1, 5, 4, 6)] == [True, True, False, False, True, False, True]


def test_a_request_that_never_came_in_is_sent_again(clock: Clock) -> None:
    state = recovery(clock)
    assert state.after(LOST, FIRST) == Attempt(True, 1.0)
    assert state.after(GONE, Attempt(attach=True)) == Attempt(False, 0.0)


def test_a_server_that_is_not_there_is_not_waited_for(clock: Clock) -> None:
    state = recovery(clock)
    for attach in (False, True):
        state.after(LOST, Attempt(attach=attach))
    with pytest.raises(OctavoError) as raised:
        state.after(LOST, Attempt(attach=True))
    assert raised.value is LOST


def test_a_stream_that_the_server_forgot_is_lost_and_an_unseen_answer_asked_for_anew(clock: Clock) -> None:
    with pytest.raises(UnavailableError, match="send the request again") as raised:
        recovery(clock, received=3).after(GONE, Attempt(attach=True))
    assert isinstance(raised.value.__cause__, NotFoundError)
    state = recovery(clock, received=3, restartable=True)
    assert state.after(GONE, Attempt(attach=True)) == Attempt(False, 1.0)
    assert state.accept(1)


def test_without_a_grace_time_a_stream_is_lost_with_its_connection(clock: Clock) -> None:
    with pytest.raises(UnavailableError, match="lost after event 3"):
        recovery(clock, received=3, attachable=False).after(LOST, FIRST)
    assert recovery(clock, attachable=False).after(LOST, FIRST) == Attempt(False, 1.0)


def test_no_pause_outlasts_the_deadline(clock: Clock) -> None:
    state = recovery(clock)
    state.deadline = clock.now + 0.5
    assert state.remaining_s() == 0.5
    with pytest.raises(OctavoError) as raised:
        state.after(FULL, FIRST)
    assert raised.value is FULL
    clock.now += 1
    assert state.remaining_s() == 0
