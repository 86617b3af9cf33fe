"""How much work a cell is reckoned to have: what it told last, moved by what was sent there and ended since."""

from typing import Any

import pytest

from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.session import CellWork
from octavo.wire import history
from octavo.wire.requests import EXPECTED_ANSWER, Delta, FinishReason
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams


def journal_of(name: str = "r", prompt: int = 5, max_tokens: int = 10, **sampling: Any) -> Journal:
    journal = Journal(name, list(range(prompt)), SamplingParams(max_tokens=max_tokens, **sampling), 0.0)
    journal.start_attempt(1)
    return journal


def advance(journal: Journal, tokens: int, index: int = 0, finish: FinishReason | None = None) -> None:
    journal.accept(Delta("r", 1, index, 0, history.EMPTY, [1] * tokens, finish, 0, 0, 0), 1.0)


class TestOfARequest:
    def test_its_prompt_and_its_answer_are_to_come(self) -> None:
        assert journal_of().work_tokens == 15

    def test_with_the_first_token_the_prompt_is_over(self) -> None:
        journal = journal_of()
        advance(journal, 3)
        assert journal.work_tokens == 7

    def test_sequences_share_the_prompt(self) -> None:
        journal = journal_of(num_sequences=3)
        assert journal.work_tokens == 35
        advance(journal, 4, index=1, finish=FinishReason.STOP)
        assert journal.work_tokens == 20

    def test_beams_count_by_their_width(self) -> None:
        beam = BeamSearch(width=4, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
        assert journal_of(beam=beam).work_tokens == 45

    def test_an_answer_without_a_near_limit_is_reckoned_to_end_before(self) -> None:
        journal = journal_of(max_tokens=100_000)
        assert journal.work_tokens == 5 + EXPECTED_ANSWER
        advance(journal, EXPECTED_ANSWER + 10)
        assert journal.work_tokens == 1

    def test_a_complete_one_is_none(self) -> None:
        journal = journal_of()
        advance(journal, 2, finish=FinishReason.STOP)
        assert journal.work_tokens == 0


@pytest.fixture
def work() -> CellWork:
    return CellWork()


class TestOfACell:
    def test_what_is_sent_counts_until_it_ends(self, work: CellWork) -> None:
        first, second = journal_of("a"), journal_of("b")
        work.add(first)
        work.add(second)
        assert work.tokens == 30
        advance(first, 4)
        work.drop(first)
        work.drop(first)
        assert work.tokens == 15

    def test_what_is_told_holds_what_others_sent(self, work: CellWork) -> None:
        mine = journal_of("a")
        work.add(mine)
        work.reported(100, [mine])
        assert work.tokens == 100
        work.add(journal_of("b"))
        assert work.tokens == 115
        work.drop(mine)
        assert work.tokens == 100

    def test_progress_is_seen_when_it_is_told(self, work: CellWork) -> None:
        mine = journal_of()
        work.add(mine)
        advance(mine, 4)
        work.reported(6, [mine])
        assert work.tokens == 6

    def test_a_scheduler_that_has_not_yet_counted_what_is_under_way(self, work: CellWork) -> None:
        mine = journal_of()
        work.add(mine)
        work.reported(0, [mine])
        assert work.tokens == 15
