"""What metrics, books and traces are told of one request."""

from typing import Any

from octavo.frontend.access.admission import Admission
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Broken, Reason, ServiceError
from octavo.frontend.request.events import RequestNotice, RequestUsage
from octavo.frontend.request.request import ANYBODY, GenerationRequest
from octavo.frontend.scheduler.journal import DeltaVerdict, Journal
from octavo.frontend.stream.answer import Answer
from octavo.frontend.stream.observer import Observer
from octavo.frontend.stream.running import RunningRequest
from octavo.frontend.text.detokenizer import Vocabulary
from octavo.runtime.telemetry.tracing import Span
from octavo.testing.small.tokenizers import byte_level_tokenizer
from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason, NoticeKind
from octavo.wire.sampling import SamplingParams

VOCABULARY = Vocabulary(byte_level_tokenizer())


class Told(Observer, Span):
    """All that is told to either, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "calls" or name.startswith("__") or name == "traceparent":
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


class Metered:
    """A request of three prompt tokens and at most four new ones, and who is told of it."""

    def __init__(self, tmp_path: Any) -> None:
        self.told = Told()
        config = FrontendConfig(model_directory=tmp_path, served_model_name="m", listen="", scheduler_endpoints=())
        self.admission = Admission(config)
        request = GenerationRequest(prompt=[1, 2, 3], max_new_tokens=100)
        ticket = self.admission.admit(request, "")
        self.running = RunningRequest(request, "r", "", ANYBODY, 10.0, ticket, self.told, self.told)
        journal = Journal("r", [1, 2, 3], SamplingParams(max_tokens=4), 10.0)
        self.running.answer = Answer(journal, request, "m", VOCABULARY, frozenset())
        self.running.report_prepared()

    def read(self, at: float, *token_ids: int, **more: Any) -> None:
        """What has come of its only sequence is taken; the first time the request is seen to have begun alone."""
        journal, answer = self.running.journal, self.running.answer
        assert answer
        if token_ids:
            [sequence] = journal.sequences
            start, before = len(sequence.token_ids), history.extend(history.EMPTY, sequence.token_ids)
            delta = Delta("r", 0, 0, start, before, list(token_ids), None, 0, 0, 2, **more)
            assert journal.accept(delta, at) is DeltaVerdict.ACCEPTED
        before_tokens = answer.num_tokens
        events = answer.advance(self.running.take_notices())
        self.running.report_events(events, answer.num_tokens - before_tokens)

    def end(self, error: ServiceError | None = None) -> None:
        self.running.end(error)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.told.calls if call[0] in names]


async def test_tokens_are_counted_with_the_time_since_those_before(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.read(10.5, 5)
    metered.read(10.5)
    metered.read(11.0, 6, 7)
    metered.read(11.0)
    assert metered.named("prompt_tokens", "first_token", "tokens") == [
        ("prompt_tokens", 3, 2),
        ("first_token", 0.5),
        ("tokens", 1, None),
        ("tokens", 2, 0.5),
    ]


async def test_its_work_is_what_it_may_take_less_what_is_done(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    assert metered.admission.work_tokens == 7
    metered.read(10.5, 5)
    assert metered.admission.work_tokens == 4
    metered.read(10.5)
    assert metered.admission.work_tokens == 3
    metered.end()
    assert (metered.admission.work_tokens, metered.admission.requests) == (0, 1)
    metered.running.ticket.release()
    assert metered.admission.requests == 0


async def test_work_that_never_began_is_given_back_at_the_end(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.end()
    assert metered.admission.work_tokens == 0


async def test_notices_are_events_of_its_span(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    for kind in (NoticeKind.PREEMPTED, NoticeKind.RESUMED):
        metered.running.tell(RequestNotice(kind))
    metered.read(10.5)
    assert metered.named("event") == [("event", "preempted"), ("event", "resumed")]


async def test_what_became_of_drafts_is_told_at_the_end_of_its_span(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.read(10.5, 5)
    metered.read(12.0, 6, 7, 8, drafted=5, accepted=2)
    metered.end()
    assert metered.named("set")[-1] == ("set", 5, 2)


async def test_an_answer_to_its_end_is_finished(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.read(10.5, 5)
    metered.read(12.0, 6, 7, 8)
    metered.end()
    assert metered.named("sequence_finished", "finished", "end") == [
        ("sequence_finished", FinishReason.LENGTH),
        ("finished", RequestUsage(3, 4, 0, 0, 2, 0.5, 1.5), 2.0),
        ("end", ""),
    ]


async def test_an_error_is_a_refusal_until_something_is_told(tmp_path: Any) -> None:
    error = Broken(Reason.STEP_FAILED, "why")
    first, second = Metered(tmp_path), Metered(tmp_path)
    second.read(10.5, 5)
    for metered in (first, second):
        metered.end(error)
        assert metered.named("end") == [("end", "STEP_FAILED")]
    assert first.named("refused", "failed") == [("refused", error)]
    assert second.named("refused", "failed") == [("failed", error)]


async def test_the_end_of_an_unfinished_one_is_that_its_client_left(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.read(10.5, 5)
    metered.end()
    assert metered.named("left", "finished", "failed") == [("left",)]
