"""What metrics, books and traces are told of one request."""

from typing import Any

from octavo.frontend.access.admission import Admission
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Broken, Reason
from octavo.frontend.request.events import Emitted, Finished, FinishReason, Notice, Started, TextDelta, Usage
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.stream.meter import Meter, Observer
from octavo.runtime.telemetry.tracing import Span
from octavo.wire.requests import NoticeKind
from octavo.wire.sampling import SamplingParams

USAGE = Usage(3, 4, 0, 0, 2, 0.5, 1.5)


class Told(Observer, Span):
    """All that is told to either, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "calls" or name.startswith("__") or name == "traceparent":
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


class Metered:
    """A meter of a request of three prompt tokens and at most four new ones, and who it tells."""

    def __init__(self, tmp_path: Any) -> None:
        self.told = Told()
        config = FrontendConfig(model_directory=tmp_path, served_model_name="m", listen="", scheduler_endpoints=())
        self.admission = Admission(config)
        ticket = self.admission.admit(GenerationRequest(prompt=[1, 2, 3], max_new_tokens=100), "")
        self.meter = Meter(self.told, ticket, self.told, arrived_at=10.0)
        self.journal = Journal("r", [1, 2, 3], SamplingParams(max_tokens=4), 10.0)
        self.journal.cached_prompt_tokens = 2
        self.meter.prepared(self.journal)

    def advance(self, num_tokens: int, at: float, *events: Any) -> None:
        self.journal.first_token_at = self.journal.first_token_at or at
        self.journal.last_token_at = at
        self.meter.advanced(self.journal, num_tokens, [Emitted(1, event) for event in events])

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.told.calls if call[0] in names]


def test_tokens_are_counted_with_the_time_since_those_before(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.advance(0, 10.5, Started("r", "m", [1, 2, 3], 0, []))
    metered.advance(1, 10.5, TextDelta("x", [5]))
    metered.advance(3, 11.0, TextDelta("y", [6, 7]))
    metered.advance(3, 11.0)
    assert metered.named("prompt_tokens", "first_token", "tokens") == [
        ("prompt_tokens", 3, 2),
        ("first_token", 0.5),
        ("tokens", 1, None),
        ("tokens", 2, 0.5),
    ]


def test_its_work_is_what_it_may_take_less_what_is_done(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    assert metered.admission.work_tokens == 7
    metered.advance(1, 10.5, Started("r", "m", [1, 2, 3], 0, []))
    assert metered.admission.work_tokens == 3
    metered.meter.ended(None)
    assert (metered.admission.work_tokens, metered.admission.requests) == (0, 1)
    metered.meter.forgotten()
    assert metered.admission.requests == 0


def test_notices_are_events_of_its_span(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.advance(0, 10.5, Notice(NoticeKind.PREEMPTED), Notice(NoticeKind.RESUMED))
    assert metered.named("event") == [("event", "preempted"), ("event", "resumed")]


def test_an_answer_to_its_end_is_finished(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.advance(4, 12.0, TextDelta("x", [5]), Finished(FinishReason.LENGTH, None), USAGE)
    metered.meter.ended(None)
    assert metered.named("sequence_finished", "finished", "end") == [
        ("sequence_finished", FinishReason.LENGTH),
        ("finished", USAGE, 2.0),
        ("end", ""),
    ]


def test_an_error_is_a_refusal_until_something_is_told(tmp_path: Any) -> None:
    error = Broken(Reason.STEP_FAILED, "why")
    first, second = Metered(tmp_path), Metered(tmp_path)
    second.advance(1, 10.5, TextDelta("x", [5]))
    for metered in (first, second):
        metered.meter.ended(error)
        assert metered.named("end") == [("end", "STEP_FAILED")]
    assert first.named("refused", "failed") == [("refused", error)]
    assert second.named("refused", "failed") == [("failed", error)]


def test_the_end_of_an_unfinished_one_is_that_its_client_left(tmp_path: Any) -> None:
    metered = Metered(tmp_path)
    metered.advance(1, 10.5, TextDelta("x", [5]))
    metered.meter.ended(None)
    assert metered.named("left", "finished", "failed") == [("left",)]
