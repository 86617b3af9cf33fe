"""Plays one client and its request in a frontend: production code from the journal to the events, all of them
checked."""

from collections.abc import Iterable

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted, Finished, Notice, TextDelta
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.reader import Reader
from octavo.frontend.scheduler.session import LiveRequest, SchedulerSession
from octavo.frontend.stream.answer import Completion, EndRules
from octavo.frontend.stream.stream import Shape, Stream
from octavo.frontend.text.detokenizer import StopStrings
from octavo.testbed.history import Came, Choice, ChoiceEnded, Closed, Notified, Tokens
from octavo.testing.simulation.reference import Reference, reference
from octavo.testing.simulation.watch import Key, Watch
from octavo.testing.simulation.workload import ClientPlan, Model
from octavo.wire.requests import CacheKey, FromFrontend, NoticeKind


class _Words:
    """A detokenizer that writes every token as a word of its own."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(_word, token_ids))

    def finish(self) -> str:
        return ""


class _ClientReader(Reader):
    """Notes that there is something to see; nobody waits here."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.has_news = False
        self._journal = journal

    def tell(self, notice: Notice) -> None:
        assert not self._journal.complete, f"{self._journal.request_id} has all its tokens, and is told {notice}"
        super().tell(notice)

    def notify(self) -> None:
        self.has_news = True

    def fail(self, failure: ServiceError) -> None:
        super().fail(failure)
        self.has_news = True


class Client:
    """A request from its submission to the end of its stream: `is_served` whole, or without its `failure`. What comes
    of it is shown to `watch`, under `key`."""

    def __init__(self, plan: ClientPlan, model: Model, now: float, key: Key, watch: Watch) -> None:
        self.plan = plan
        self._key = key
        self._watch = watch
        self.is_served = False
        self._reference: Reference = reference(plan, model)
        self._journal = Journal(
            plan.request_id,
            plan.prompt_token_ids,
            plan.sampling,
            now,
            priority=plan.priority,
            tenant=plan.tenant,
            cache_key=CacheKey(salt=plan.salt),
            max_queue_s=plan.max_queue_s,
        )
        self._reader = _ClientReader(self._journal)
        self.live = LiveRequest(self._journal, self._reader)
        shape = Shape("model", plan.num_results, plan.incremental, lambda: _completion(plan, model))
        self._stream = Stream(self._journal, self._reader, shape)
        self._told: list[Emitted] = []
        self._num_checked = [0] * len(self._journal.sequences)
        answer = [Choice(self._reference.delivered[index]) for index in self._reference.order]
        watch.see(Came(watch.awake_s, key, answer))

    @property
    def failure(self) -> ServiceError | None:
        """Returns the error with which the stream ended before its time."""
        return self._reader.failure

    def fail(self, failure: ServiceError) -> None:
        """The frontend gives the request up, unless all of it has come."""
        if not self._journal.complete:
            self._reader.fail(failure)

    def advance(self, session: SchedulerSession) -> list[FromFrontend]:
        """Reads what has come; what is to be said to the scheduler. Raises `AssertionError` on a wrong token."""
        messages: list[FromFrontend] = []
        while self._reader.has_news and not (self.failure or self.is_served):
            self._reader.has_news = False
            self._check_journal()
            for emitted in self._stream.advance():
                self._take(emitted)
            for index in self._stream.ended_here():
                messages += session.end_sequence(self.live, index)
            if self._stream.finished:
                self._check_whole()
                self.is_served = True
        return messages

    def _take(self, emitted: Emitted) -> None:
        self._told.append(emitted)
        now, key, offset = self._watch.awake_s, self._key, emitted.offset
        match emitted.event:
            case Finished(index=place):
                self._watch.see(ChoiceEnded(now, key, offset, place))
            case TextDelta(index=place, token_ids=token_ids):
                self._watch.see(Tokens(now, key, offset, place, token_ids))
            case other:
                if isinstance(other, Notice):
                    assert (other.queue_position == 0) == (other.kind is NoticeKind.RESUMED)
                self._watch.see(Notified(now, key, offset))

    def _check_journal(self) -> None:
        """Checks that what the frontend has accepted begins what was to be generated."""
        for index, (sequence, expected) in enumerate(
            zip(self._journal.sequences, self._reference.generated, strict=True)
        ):
            done, count = self._num_checked[index], len(sequence.token_ids)
            assert sequence.token_ids[done:] == expected[done:count], (
                f"sequence {index} of {self.plan.request_id} is {sequence.token_ids}, not the beginning of {expected}"
            )
            self._num_checked[index] = count

    def _check_whole(self) -> None:
        self._watch.see(Closed(self._watch.awake_s, self._key))
        assert self._journal.prompt_logprobs == self._reference.prompt_logprobs, "other prompt logprobs"
        again = [emitted for batch in self._stream.sent_after(0) for emitted in batch]
        assert again == self._told, f"{self.plan.request_id} reads something else when it reads again"
        totals = [sequence.cumulative_logprob for sequence in self._journal.sequences]
        assert totals == self._reference.cumulative_logprobs, "other scores"
        for sequence, logprobs in zip(self._journal.sequences, self._reference.logprobs, strict=True):
            assert sequence.logprobs == logprobs[: len(sequence.logprobs)], "other logprobs"


def _completion(plan: ClientPlan, model: Model) -> Completion:
    rules = EndRules(
        max_tokens=plan.sampling.max_tokens,
        min_tokens=plan.sampling.min_tokens,
        stop_token_ids=frozenset(plan.sampling.stop_token_ids),
        eos_token_ids=frozenset(model.vocabulary.eos_token_ids),
        include_stop=False,
    )
    stop_strings = [] if plan.stop_token_id is None else [_word(plan.stop_token_id)]
    return Completion(rules, _Words(), StopStrings(stop_strings, include_stop=False))


def _word(token_id: int) -> str:
    return f"<{token_id}>"
