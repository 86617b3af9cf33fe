"""Plays one client and its request in a frontend: production code from the journal to the events, all of them
checked."""

from collections.abc import Iterable

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted, OutputReady, RequestNotice, SequenceFinished, TextDelta
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.session import SchedulerSession
from octavo.frontend.stream.answer import Answer
from octavo.frontend.stream.pooling import OutputAnswer
from octavo.testbed.history import Came, ChoiceEnded, Closed, Notified, SequenceAnswer, Tokens
from octavo.testing.simulation.reference import Reference, reference
from octavo.testing.simulation.watch import Key, Watch
from octavo.testing.simulation.workload import ClientPlan, Model
from octavo.wire.pooling import PoolingParams, PoolingTask
from octavo.wire.requests import CacheKey, FromFrontend, NoticeKind


class _Words:
    """A detokenizer that writes every token as a word of its own, and holds nothing."""

    start = None

    def feed(self, held: None, token_ids: Iterable[int]) -> tuple[str, None]:
        return "".join(map(_word, token_ids)), None

    def finish(self, held: None) -> str:
        return ""


class _Speech:
    """Has a detokenizer of words."""

    def detokenizer(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> _Words:
        return _Words()


class Client:
    """A request from its submission to the end of its stream: `is_served` whole, or without its `failure`. What comes
    of it is shown to `watch`, under `key`. A session runs it as a `LiveRequest`; nobody waits here."""

    def __init__(self, plan: ClientPlan, model: Model, now: float, key: Key, watch: Watch) -> None:
        self.plan = plan
        self._key = key
        self._watch = watch
        self.is_served = False
        # The error with which the stream ended before its time.
        self.failure: ServiceError | None = None
        self._has_news = False
        self._notices: dict[NoticeKind, RequestNotice] = {}
        self._reference: Reference = reference(plan, model)
        self.journal = Journal(
            plan.request_id,
            plan.prompt_token_ids,
            plan.sampling,
            now,
            priority=plan.priority,
            tenant=plan.tenant,
            cache_key=CacheKey(salt=plan.salt),
            max_queue_s=plan.max_queue_s,
            pooling=PoolingParams(PoolingTask.EMBED) if plan.pools else None,
        )
        asked = GenerationRequest(
            plan.prompt_token_ids,
            num_sequences=plan.num_results,
            incremental=plan.incremental,
            stop_strings=() if plan.stop_token_id is None else (_word(plan.stop_token_id),),
        )
        self._answer = (
            OutputAnswer(self.journal)
            if plan.pools
            else Answer(self.journal, asked, "model", _Speech(), frozenset(model.vocabulary.eos_token_ids))
        )
        self._told: list[Emitted] = []
        self._num_checked = [0] * len(self.journal.sequences)
        answer = [SequenceAnswer(self._reference.delivered[index]) for index in self._reference.order]
        watch.see(Came(watch.awake_s, key, answer))

    def notify(self) -> None:
        self._has_news = True

    def tell(self, notice: RequestNotice) -> None:
        assert not self.journal.complete, f"{self.journal.request_id} has all its tokens, and is told {notice}"
        self._notices.pop(notice.kind, None)
        self._notices[notice.kind] = notice
        self.notify()

    def fail(self, failure: ServiceError) -> None:
        self.failure = self.failure or failure
        self.notify()

    def give_up(self, failure: ServiceError) -> None:
        """The frontend gives the request up, unless all of it has come."""
        if not self.journal.complete:
            self.fail(failure)

    def advance(self, session: SchedulerSession) -> list[FromFrontend]:
        """Reads what has come; what is to be said to the scheduler. Raises `AssertionError` on a wrong token."""
        messages: list[FromFrontend] = []
        while self._has_news and not (self.failure or self.is_served):
            self._has_news = False
            self._check_journal()
            notices, self._notices = self._notices, {}
            for emitted in self._answer.advance(notices.values()):
                self._take(emitted)
            for index in self._answer.ended_here:
                messages += session.end_sequence(self, index)
            if self._answer.finished:
                self._check_whole()
                self.is_served = True
            elif self._answer.fault:
                self.fail(self._answer.fault)
            elif self._answer.behind:
                self.notify()
        return messages

    def _take(self, emitted: Emitted) -> None:
        self._told.append(emitted)
        now, key, offset = self._watch.awake_s, self._key, emitted.offset
        match emitted.event:
            case SequenceFinished(index=place):
                self._watch.see(ChoiceEnded(now, key, offset, place))
            case OutputReady(values=values):
                assert values == self._reference.output, f"{self.plan.request_id} gets another output"
                self._watch.see(ChoiceEnded(now, key, offset, 0))
            case TextDelta(index=place, token_ids=token_ids):
                self._watch.see(Tokens(now, key, offset, place, token_ids))
            case other:
                if isinstance(other, RequestNotice):
                    assert (other.queue_position == 0) == (other.kind is NoticeKind.RESUMED)
                self._watch.see(Notified(now, key, offset))

    def _check_journal(self) -> None:
        """Checks that what the frontend has accepted begins what was to be generated."""
        for index, (sequence, expected) in enumerate(
            zip(self.journal.sequences, self._reference.generated, strict=True)
        ):
            done, count = self._num_checked[index], len(sequence.token_ids)
            assert sequence.token_ids[done:] == expected[done:count], (
                f"sequence {index} of {self.plan.request_id} is {sequence.token_ids}, not the beginning of {expected}"
            )
            self._num_checked[index] = count

    def _check_whole(self) -> None:
        self._watch.see(Closed(self._watch.awake_s, self._key))
        assert self.journal.prompt_logprobs == self._reference.prompt_logprobs, "other prompt logprobs"
        again = [emitted for batch in self._answer.sent_after(0) for emitted in batch]
        assert again == self._told, f"{self.plan.request_id} reads something else when it reads again"
        totals = [sequence.cumulative_logprob for sequence in self.journal.sequences]
        assert totals == self._reference.cumulative_logprobs, "other scores"
        for sequence, logprobs in zip(self.journal.sequences, self._reference.logprobs, strict=True):
            assert list(sequence.logprobs) == logprobs[: len(sequence.logprobs)], "other logprobs"


def _word(token_id: int) -> str:
    return f"<{token_id}>"
