"""That the judge finds each thing that may not be, and nothing where all is well."""

from collections.abc import Callable, Iterable

import pytest

from octavo.testbed.history import (
    WORKER_LOST,
    Came,
    ChoiceEnded,
    Closed,
    Event,
    HeldLoad,
    Left,
    Notified,
    RequestsHeld,
    SequenceAnswer,
    Stepped,
    Struck,
    Tokens,
    Wrong,
)
from octavo.testbed.judge import ZOMBIE_S, Judge, judge

ANSWER = [
    SequenceAnswer([7, 8, 9, 10, 11], "abcde", [0.1, 0.2, 0.3, 0.4, 0.5], "length"),
    SequenceAnswer([20, 21], "xy", [], "stop"),
]
R = "request"


def good() -> list[Event]:
    """A request of two choices, as it should be."""
    return [
        Came(0.0, R, ANSWER),
        Notified(0.1, R, 1),
        Tokens(0.2, R, 2, 0, [7, 8], "ab", [0.1, 0.2]),
        Tokens(0.3, R, 3, 1, [20, 21], "xy"),
        Tokens(0.4, R, 4, 0, [9], "c", [0.3]),
        ChoiceEnded(0.5, R, 5, 1, "stop"),
        Tokens(0.6, R, 6, 0, [10, 11], "de", [0.4, 0.5]),
        ChoiceEnded(0.7, R, 7, 0, "length"),
        Notified(0.8, R, 8),
        Closed(0.9, R),
        HeldLoad(2.0, 0, 0),
    ]


def renumbered(events: Iterable[Event]) -> list[Event]:
    """The same with offsets that have no gap, so that only what they carry is wrong."""
    offset = 0
    result: list[Event] = []
    for event in events:
        match event:
            case Notified(time, request, _, what):
                offset += 1
                result.append(Notified(time, request, offset, what))
            case Tokens(time, request, _, index, token_ids, text, logprobs):
                offset += 1
                result.append(Tokens(time, request, offset, index, token_ids, text, logprobs))
            case ChoiceEnded(time, request, _, index, end):
                offset += 1
                result.append(ChoiceEnded(time, request, offset, index, end))
            case _:
                result.append(event)
    return result


def without(place: int) -> list[Event]:
    events = good()
    del events[place]
    return events


def with_instead(place: int, *events: Event) -> list[Event]:
    return [*good()[:place], *events, *good()[place + 1 :]]


def wrongs(events: list[Event]) -> set[Wrong]:
    return {fault.wrong for fault in judge(events).faults}


def test_nothing_is_wrong_with_a_good_run() -> None:
    judged = judge(good())
    assert judged.faults == []
    assert judged.num_whole == 1


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        pytest.param(without(1), Wrong.LOST, id="an event is missing"),
        pytest.param(
            with_instead(1, Notified(0.1, R, 1), Notified(0.11, R, 1)), Wrong.REPEATED, id="an event comes twice"
        ),
        pytest.param(renumbered(without(2)), Wrong.LOST, id="tokens are missing"),
        pytest.param(renumbered(without(6)), Wrong.LOST, id="the last tokens are missing"),
        pytest.param(
            renumbered(with_instead(4, good()[4], Tokens(0.41, R, 0, 0, [9], "c", [0.3]))),
            Wrong.REPEATED,
            id="a token comes twice",
        ),
        pytest.param(with_instead(4, Tokens(0.4, R, 4, 0, [11], "c", [0.3])), Wrong.LOST, id="a later token comes"),
        pytest.param(with_instead(4, Tokens(0.4, R, 4, 0, [99], "c", [0.3])), Wrong.CHANGED, id="another token comes"),
        pytest.param(with_instead(4, Tokens(0.4, R, 4, 2, [99])), Wrong.CHANGED, id="a choice that there is not"),
        pytest.param(with_instead(4, Tokens(0.4, R, 4, 0, [9], "C", [0.3])), Wrong.CHANGED, id="another text"),
        pytest.param(with_instead(4, Tokens(0.4, R, 4, 0, [9], "c", [0.31])), Wrong.CHANGED, id="other logprobs"),
        pytest.param(with_instead(7, ChoiceEnded(0.7, R, 7, 0, "stop")), Wrong.CHANGED, id="another end"),
        pytest.param(
            renumbered(with_instead(5, good()[5], ChoiceEnded(0.51, R, 0, 1, "stop"))), Wrong.TWO_ENDS, id="two ends"
        ),
        pytest.param([*good(), Closed(1.0, R)], Wrong.TWO_ENDS, id="a stream is closed twice"),
        pytest.param(
            renumbered(with_instead(7, good()[7], Tokens(0.71, R, 0, 0, [12], "f"))),
            Wrong.AFTER_END,
            id="tokens after the end",
        ),
        pytest.param([*good(), Notified(1.0, R, 9)], Wrong.AFTER_END, id="events after the end"),
        pytest.param(renumbered(without(7)), Wrong.NO_END, id="a choice does not end"),
        pytest.param(without(9), Wrong.NO_END, id="a stream does not end"),
        pytest.param(with_instead(9, Closed(0.9, R, "INTERNAL")), Wrong.ERROR, id="an error"),
        pytest.param(with_instead(10, HeldLoad(2.0, 0, 3)), Wrong.LEAK, id="blocks are held"),
        pytest.param(with_instead(10, HeldLoad(2.0, 1, 0)), Wrong.LEAK, id="requests are held"),
        pytest.param(without(10), Wrong.LEAK, id="nobody looks"),
        pytest.param([*good(), RequestsHeld(0.2, [R, R])], Wrong.TWICE, id="a request is held twice"),
    ],
)
def test_each_fault_is_found(events: list[Event], wrong: Wrong) -> None:
    assert wrong in wrongs(events)


def test_an_error_that_is_allowed_is_none() -> None:
    came = Came(0.0, R, ANSWER, frozenset({"ABORTED"}))
    assert wrongs([came, Closed(0.5, R, "ABORTED"), HeldLoad(1.0, 0, 0)]) == set()
    assert wrongs([came, Closed(0.5, R, "INTERNAL"), HeldLoad(1.0, 0, 0)]) == {Wrong.ERROR}


def test_where_no_answer_is_known_the_order_is_judged_all_the_same() -> None:
    events = [Came(0.0, R, None), *good()[1:]]
    assert wrongs(events) == set()
    assert wrongs([event for event in events if event.time != 0.5]) == {Wrong.LOST, Wrong.NO_END}


def test_what_comes_for_a_client_that_has_gone_is_not_judged() -> None:
    assert wrongs([*good()[:3], Left(0.25, R), *good()[4:]]) == set()


def steps_after_leaving(*times: float) -> list[Event]:
    steps = [Stepped(1.0 + time, frozenset({R, "another"})) for time in times]
    return [Came(0.0, R, ANSWER), *steps, Left(1.0, R), HeldLoad(9.0, 0, 0)]


@pytest.mark.parametrize(
    "times",
    [
        pytest.param((-0.3, -0.2, -0.1), id="before it left"),
        pytest.param((0.3, 0.4), id="no more than are under way"),
        pytest.param((0.01, 0.02, 0.05, 0.1), id="soon enough"),
    ],
)
def test_steps_under_way_are_no_zombies(times: tuple[float, ...]) -> None:
    assert wrongs(steps_after_leaving(*times)) == set()


def test_steps_that_go_on_are_zombies_and_told_once() -> None:
    faults = judge(steps_after_leaving(0.1, 0.15, ZOMBIE_S + 0.01, 0.5, 0.6)).faults
    assert [fault.wrong for fault in faults] == [Wrong.ZOMBIE]


def test_what_is_held_for_long_for_nobody_is_a_zombie() -> None:
    seen = Judge(held_s=5.0)
    for event in (Came(0.0, R, None), Left(1.0, R), RequestsHeld(5.9, [R])):
        seen.take(event)
    assert seen.faults == []
    seen.take(RequestsHeld(6.1, [R]))
    assert [fault.wrong for fault in seen.faults] == [Wrong.ZOMBIE]


def test_a_client_that_comes_again_under_the_same_name_is_waited_for() -> None:
    seen = Judge(held_s=5.0)
    for event in (Came(0.0, R, None), Left(1.0, R), Came(2.0, R, None), RequestsHeld(9.0, [R])):
        seen.take(event)
    assert seen.faults == []


def silences(*times: float, begin: Callable[[float], Event]) -> list[float]:
    tokens = [Tokens(time, R, offset, 0, [7]) for offset, time in enumerate(times, 1)]
    events: list[Event] = [Came(0.0, R, None), begin(1.0), *tokens]
    seen = judge(events)
    return [gap for aftermath in seen.aftermaths for gap in aftermath.gap_s.values()]


def test_the_longest_silence_after_a_strike_is_measured() -> None:
    gaps = silences(0.2, 0.95, 1.65, 1.7, begin=lambda time: Struck(time, "worker"))
    assert gaps == [pytest.approx(0.7)]


def test_a_stream_that_had_not_begun_has_no_gap() -> None:
    assert silences(1.5, begin=lambda time: Struck(time, "worker")) == []


def test_silence_long_after_a_strike_has_another_cause() -> None:
    gaps = silences(0.9, 1.1, 6.5, 9.0, begin=lambda time: Struck(time, "worker"))
    assert gaps == [pytest.approx(5.4)]


def test_when_a_loss_was_noticed_is_measured_once() -> None:
    seen = Judge()
    told = (Notified(1.05, R, 1, WORKER_LOST), Notified(1.5, R, 2, WORKER_LOST))
    for event in (Came(0.0, R, None), Struck(1.0, "worker"), *told):
        seen.take(event)
    assert seen.aftermaths[0].noticed_s == {R: pytest.approx(0.05)}
