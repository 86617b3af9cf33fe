from dataclasses import replace
from itertools import cycle, islice

import pytest

from octavo.bench.whole.speculation import (
    Answer,
    Round,
    UnequalTokensError,
    check_equal,
    count_guesses,
    make_row,
    make_rows,
    to_lines,
)
from octavo.bench.whole.speculation_works import WORKS, Prompt
from octavo.scheduler.core.events import StepAnswered
from octavo.scheduler.server.event_log import Handled, Planned, Record
from octavo.wire.steps import (
    BlockMoves,
    FurtherTokens,
    SequenceDraft,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
)


@pytest.mark.parametrize("name", WORKS)
def test_a_work_is_the_same_each_time_and_its_prompts_differ_behind_the_examples(name: str) -> None:
    work = WORKS[name]
    made = work.prompts(seed=3, count=20)
    assert made == work.prompts(seed=3, count=20)
    assert made != work.prompts(seed=4, count=20)
    assert len({tuple(prompt.said) for prompt in made}) == 20
    assert len({tuple(prompt.said[: 2 * work.shots]) for prompt in made}) == 1
    assert all(prompt.goes_on == bool(work.given) for prompt in made)
    assert all(bool(prompt.answer) == work.copies for prompt in made)


def test_an_edit_wants_the_function_with_another_name() -> None:
    for prompt in WORKS["edit"].prompts(seed=0, count=20):
        name = prompt.said[-1].split("`")[1]
        source = prompt.said[-1].split("\n\n", 1)[1]
        assert name in source
        assert prompt.answer.replace("renamed", name) == source


def test_a_quotation_goes_on_from_its_first_words() -> None:
    for prompt in WORKS["quote"].prompts(seed=0, count=20):
        *_, question, begun = prompt.said
        quoted = (begun + prompt.answer).split("\n\n")[0].strip('"')
        assert question.endswith(f"\n\n{quoted}")
        assert len(begun.split()) == 4


def test_more_prompts_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="there are"):
        WORKS["quote"].prompts(seed=0, count=5000)


def _answer(token_ids: list[int]) -> Answer:
    return Answer(token_ids, "a b c", 1.0, [2.0 + 0.01 * place for place in range(len(token_ids))])


@pytest.mark.parametrize(("period", "loops"), [(1, True), (16, True), (17, False)])
def test_an_answer_loops_whose_last_tokens_come_again_and_again(period: int, loops: bool) -> None:
    assert _answer([900, 901, *islice(cycle(range(period)), 64)]).loops is loops


def test_a_short_answer_does_not_loop() -> None:
    assert not _answer([7] * 63).loops


def test_other_tokens_are_an_error_and_so_are_none() -> None:
    check_equal("chat", 4, [[_answer([1, 2])], [_answer([1, 2])]])
    with pytest.raises(UnequalTokensError, match="request 0 got other tokens"):
        check_equal("chat", 4, [[_answer([1, 2])], [_answer([1, 3])]])
    with pytest.raises(UnequalTokensError, match="request 0 got no token"):
        check_equal("chat", 4, [[_answer([])], [_answer([])]])


def _step(step_id: int, answered_at: float, drafts: dict[int, int], right: dict[int, int]) -> list[Record]:
    drafted = [SequenceDraft(sequence_id, [5] * length) for sequence_id, length in drafts.items()]
    further = [FurtherTokens(sequence_id, [5] * length, []) for sequence_id, length in right.items()]
    result = StepResult(1, 1, step_id, StepOutcome.DONE, [], [], [], [], StepTimes(0, 0, 0), "", further)
    return [
        Planned(StepPlan(1, 1, step_id, 0, [], BlockMoves(), [], [], [], [], drafted)),
        Handled(answered_at, StepAnswered(1, result)),
    ]


def test_guesses_are_counted_by_depth_in_the_time_they_were_answered_in() -> None:
    records = [
        *_step(1, 1.0, {10: 3}, {10: 3}),
        *_step(2, 2.0, {10: 3, 11: 4}, {10: 1}),
        *_step(3, 2.5, {}, {}),
        *_step(4, 3.0, {10: 1}, {10: 1}),
    ]
    first, second, third = count_guesses(records, [(0.5, 1.5), (1.9, 2.6), (5.0, 6.0)])
    assert (first.steps, first.right, first.checked) == (1, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1})
    assert first.tokens_per_step == 4
    # Of the one the second guess was wrong, of the other the first; those behind were not looked at.
    assert (second.steps, second.right, second.checked) == (2, {0: 1}, {0: 2, 1: 1})
    assert second.tokens_per_step == 1.5
    assert (third.steps, third.tokens_per_step) == (0, 0)


def test_a_row_compares_the_best_rounds_and_counts_loops_apart() -> None:
    def answers(seconds: float, looping_seconds: float) -> list[Answer]:
        steady = Answer(list(range(100)), "one two", 0.0, [*[0.5] * 99, seconds])
        looping = Answer([3] * 100, "one one", 0.0, [*[0.5] * 99, looping_seconds])
        return [steady, looping]

    found = {
        "off": [Round(answers(2.0, 4.0), 0.0, 5.0, 3.0), Round(answers(2.0, 2.0), 0.0, 4.0, 4.0)],
        "auto": [Round(answers(1.0, 0.6), 0.0, 2.0, 2.5), Round(answers(1.6, 0.6), 0.0, 4.0, 2.0)],
    }
    prompts = [Prompt(["Copy: one two three"], "one two three"), Prompt(["Copy: four"], "four")]
    [guesses] = count_guesses(_step(1, 1.0, {10: 2}, {10: 1}), [(0.0, 2.0)])
    row = make_row("json", 2, prompts, found, guesses)
    assert row.tokens == 200
    assert row.tokens_per_s == {"off": [40.0, 50.0], "auto": [100.0, 50.0]}
    assert row.gain == 2.0
    assert row.median_gain == 1.75
    assert row.cpu_gain == 1.5
    assert row.steady_gain == 2.0
    assert row.loops == 0.5
    assert row.copied == 0.5
    assert row.right_by_depth == [1.0, 0.0]
    assert row.p50_ms == {"off": 0.0, "auto": 0.0}
    assert row.p99_ms["off"] > row.p99_ms["auto"] > 0
    # Two cells share the records, each by the time of its rounds.
    later = {
        setting: [replace(each, began_at=9.0, ended_at=9.5) for each in rounds] for setting, rounds in found.items()
    }
    records = [*_step(1, 1.0, {10: 2}, {10: 1}), *_step(2, 9.1, {11: 3}, {11: 3}), *_step(3, 9.2, {11: 1}, {})]
    both = make_rows({("chat", 2): found, ("random", 2): later}, records, 0)
    assert [each.work for each in both] == ["chat", "random"]
    assert [each.steps_with_guesses for each in both] == [2, 4]
    heads, line = to_lines([row])
    assert len(heads.split("  ")) > 10
    assert line.split()[:6] == ["json", "2", "50.0", "100.0", "2.00", "1.75"]
