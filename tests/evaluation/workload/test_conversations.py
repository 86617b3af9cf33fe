"""Conversations as a workload: every turn goes on from the one before."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from octavo.workload.conversations import LaterTurns, TurnSummary, by_turn, found_text, turns_text
from octavo.workload.job import Job, prompt_token_ids, read_csv, write_csv
from octavo.workload.measures import Served
from octavo.workload.synthetic import DATASETS, Dataset, Fixed, Regular, Workload

SHORT = Dataset("short", Fixed(10), Fixed(5), max_total=100)
FIRST = Job(0.0, 10, 5, conversation="a", turn=1)
SECOND = Job(0.0, 25, 5, conversation="a", turn=2, history_tokens=15, think_s=2.0)


def conversations(**settings: Any) -> dict[str, list[Job]]:
    workload = Workload(**{"dataset": SHORT, "arrivals": Regular(2.0), "num_requests": 3, "turns": 4, **settings})
    found = defaultdict(list)
    for job in workload.jobs(7):
        found[job.conversation].append(job)
    return found


def test_every_turn_begins_with_the_prompt_and_the_answer_before() -> None:
    found = conversations(think_s=3.0, prefix_tokens=20)
    assert [turns[0].arrival_s for turns in found.values()] == [0.0, 0.5, 1.0]
    for turns in found.values():
        assert [turn.turn for turn in turns] == [1, 2, 3, 4]
        assert [turn.prefix_tokens for turn in turns] == [20, 0, 0, 0]
        assert [turn.history_tokens for turn in turns] == [0, 35, 50, 65]
        assert [turn.prompt_tokens for turn in turns] == [30, 45, 60, 75]
    pauses = {turn.think_s for turns in found.values() for turn in turns[1:]}
    assert len(pauses) == 9, "each is drawn"


def test_a_conversation_ends_before_it_is_too_long() -> None:
    found = conversations(turns=50)
    assert {len(turns) for turns in found.values()} == {6}
    assert all(turns[-1].prompt_tokens + turns[-1].output_tokens == 90 for turns in found.values())


def test_turns_change_nothing_of_the_first() -> None:
    alone = conversations(turns=2)
    single = Workload(dataset=SHORT, arrivals=Regular(2.0), num_requests=3).jobs(7)
    firsts = [(turns[0].arrival_s, turns[0].prompt_tokens) for turns in alone.values()]
    assert firsts == [(job.arrival_s, job.prompt_tokens) for job in single]


def test_a_later_turn_says_what_was_said_and_something_new() -> None:
    said = list(range(1000, 1015))
    prompt = prompt_token_ids(SECOND, 4, 256, 1, said)
    assert (prompt[:15], len(prompt)) == (said, 25)
    # What was said may have become shorter.
    assert prompt_token_ids(SECOND, 4, 256, 1, said[:9]) == [*said[:9], *prompt[15:]]


def test_a_trace_keeps_conversations(tmp_path: Path) -> None:
    write_csv(tmp_path / "trace.csv", [FIRST, SECOND])
    assert read_csv(tmp_path / "trace.csv") == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"turn": 1}, "a turn has both"),
        ({"conversation": "a"}, "a turn has both"),
        ({"conversation": "a", "turn": 2}, "history_tokens of turn 2 must be from 1 to less than the prompt's 10"),
        ({"conversation": "a", "turn": 2, "history_tokens": 10}, "from 1 to less than the prompt's 10"),
        ({"conversation": "a", "turn": 2, "history_tokens": 5, "n": 2}, "goes on from one answer"),
        ({"conversation": "a", "turn": 1, "think_s": 1.0}, "for turns after the first"),
        ({"conversation": "a", "turn": 2, "history_tokens": 5, "think_s": -1.0}, "think_s must be 0 or more"),
    ],
)
def test_what_cannot_be_a_turn_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(0.0, 10, 5, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"turns": 0}, "0 turns"),
        ({"think_s": -1.0}, "cannot be"),
        ({"n": 2}, "one sequence each"),
        ({"dataset": DATASETS["chatbot"]}, "take another for all of them"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversations(**wrong)


def test_later_turns_wait_for_those_before() -> None:
    third = Job(0.0, 50, 5, conversation="a", turn=3, history_tokens=30)
    later = LaterTurns[str]()
    assert not later.hold(FIRST, "first")
    assert later.hold(third, "third")
    assert later.hold(SECOND, "second")
    assert later.after(Job(0.0, 10, 5, conversation="b", turn=1)) is None
    assert later.after(Job(0.0, 10, 5)) is None
    assert later.after(FIRST) == (SECOND, "second")
    assert later.after(SECOND) == (third, "third")
    assert later.after(third) is None


def test_turns_are_summed_up_by_their_numbers() -> None:
    served = [
        Served(FIRST, 0.5, 1.0, 5),
        Served(SECOND, 0.25, 1.0, 5, cached_tokens=15),
        Served(SECOND, 0.75, 1.0, 5, cached_tokens=5),
        Served(SECOND, error="refused"),
        Served(Job(0.0, 10, 5), 0.5, 1.0, 5),
    ]
    first, second = by_turn(served)
    assert (first.turn, first.requests, first.prompt_tokens, first.computed_tokens) == (1, 1, 10, 10)
    assert (second.turn, second.requests, second.prompt_tokens, second.computed_tokens) == (2, 2, 50, 30)
    assert second.ttft is not None
    assert second.ttft.p50 == 0.5
    head, _, line = turns_text([first, second])
    assert head.split()[:4] == ["turn", "requests", "prompts", "computed"]
    assert line.split() == ["2", "2", "50", "30", "(60%)", "500", "ms", "745", "ms"]
    assert (turns_text([]), by_turn([])) == ([], [])
    assert turns_text([TurnSummary(1, 1, 10, 10, None)])[1].endswith("-")


def test_what_was_found_is_told_by_tier() -> None:
    assert found_text(100, {"device": 30, "disk": 20}) == (
        "of 100 tokens of prompts 50 (50.0%) were computed; found, by tier: 30 device, 20 disk"
    )
