import pytest

from octavo.loadgen.servers import AnswerRecorder, Failure, Record, one_line
from octavo.workload.job import Job
from octavo.workload.measures import Gaps


class Watch:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(job: Job) -> tuple[AnswerRecorder, Gaps, Watch]:
    gaps, watch = Gaps(), Watch()
    return AnswerRecorder(Record(job, sent_s=job.arrival_s), gaps, watch), gaps, watch


def test_times_are_those_of_first_token_of_the_pauses_and_of_the_end() -> None:
    told, gaps, watch = answer(Job(1.0, 8, 3))
    for watch.now in (1.5, 1.6, 1.8):
        told.tokens(0, 1)
    told.end()
    served = told.record.served()
    assert (served.ttft, served.num_tokens, gaps.count) == (0.5, 3, 2)
    assert served.latency == pytest.approx(0.8)
    pauses = gaps.spread()
    assert pauses is not None
    assert pauses.mean == pytest.approx(0.15)
    assert pauses.max == pytest.approx(0.2)


def test_each_sequence_has_pauses_of_its_own() -> None:
    told, gaps, watch = answer(Job(0.0, 8, 2, n=2))
    for watch.now, sequence in ((1.0, 0), (1.5, 1), (2.0, 0), (2.5, 1)):
        told.tokens(sequence, 1)
    pauses = gaps.spread()
    assert pauses is not None
    assert (gaps.count, pauses.mean) == (2, 1.0)


def test_tokens_that_come_together_have_one_pause() -> None:
    told, gaps, watch = answer(Job(0.0, 8, 6))
    told.tokens(0, 1)
    watch.now = 1.0
    told.tokens(0, 5)
    assert (gaps.count, told.record.num_tokens, told.record.deliveries) == (1, 6, 2)


def test_what_the_server_counted_is_what_counts() -> None:
    told, _, _ = answer(Job(0.0, 8, 20, prefix="p", prefix_tokens=8))
    told.tokens(0, 1)
    told.usage(6, 5, cached_tokens=2, preemptions=3)
    told.end()
    served = told.record.served()
    assert (served.job.prompt_tokens, served.job.prefix_tokens, served.job.output_tokens) == (6, 6, 5)
    assert (served.num_tokens, served.preemptions, told.record.cached_tokens) == (5, 3, 2)
    assert told.record.is_short


def test_an_answer_as_long_as_asked_is_not_short() -> None:
    told, _, _ = answer(Job(0.0, 8, 5, n=2))
    told.usage(8, 10)
    told.end()
    assert not told.record.is_short
    assert told.record.served().job == told.record.job


def test_a_failed_request_keeps_the_lengths_it_should_have_had() -> None:
    told, _, _ = answer(Job(0.0, 8, 5))
    told.tokens(0, 2)
    told.record.failure = Failure("connection lost")
    served = told.record.served()
    assert (served.error, served.job.output_tokens, served.num_tokens, served.whole) == ("connection lost", 5, 2, False)


def test_tokens_without_a_text_come_at_the_end() -> None:
    told, _, watch = answer(Job(0.0, 8, 1))
    watch.now = 2.0
    told.usage(8, 1)
    told.end()
    assert told.record.first_token_s == told.record.finished_s == 2.0


def test_an_answer_without_a_token_is_a_failure() -> None:
    told, _, _ = answer(Job(0.0, 8, 1))
    with pytest.raises(Failure, match="empty answer"):
        told.end()


def test_a_detail_is_one_printable_line() -> None:
    assert one_line("a\n\x1b[31mb\tc") == "a [31mb c"
    assert len(one_line("x" * 1000)) == 300
