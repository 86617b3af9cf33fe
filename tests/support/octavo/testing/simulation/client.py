"""One client and its request in a frontend: production code from the journal to the events, all of them checked."""

from collections.abc import Iterable

from octavo.frontend.completion import Completion, EndRules
from octavo.frontend.errors import ServiceError
from octavo.frontend.events import Emitted, Finished, Notice, Piece
from octavo.frontend.journal import Journal
from octavo.frontend.reader import Reader
from octavo.frontend.scheduler_session import LiveRequest, SchedulerSession
from octavo.frontend.stop_strings import StopStrings
from octavo.frontend.stream import Shape, Stream
from octavo.testing.simulation.reference import Reference, reference
from octavo.testing.simulation.workload import ClientPlan, Model
from octavo.wire.requests import FromFrontend, NoticeKind


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
    """A request from its submission to the end of its stream: `is_served` whole, or without its `failure`."""

    def __init__(self, plan: ClientPlan, model: Model, now: float) -> None:
        self.plan = plan
        self.is_served = False
        self._reference: Reference = reference(plan, model)
        self._journal = Journal(
            plan.request_id,
            plan.prompt_token_ids,
            plan.sampling,
            now,
            priority=plan.priority,
            tenant=plan.tenant,
            salt=plan.salt,
            max_queue_s=plan.max_queue_s,
        )
        self._reader = _ClientReader(self._journal)
        self.live = LiveRequest(self._journal, self._reader)
        shape = Shape("model", plan.num_results, plan.incremental, lambda: _completion(plan, model))
        self._stream = Stream(self._journal, self._reader, shape)
        self._told: list[Emitted] = []
        self._received: list[list[int]] = [[] for _ in range(plan.num_results)]
        self._ended: set[int] = set()
        self._num_checked = [0] * len(self._journal.sequences)

    @property
    def failure(self) -> ServiceError | None:
        """Why the stream ended before its time."""
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
        assert emitted.offset == len(self._told), f"event {len(self._told)} has the offset {emitted.offset}"
        match emitted.event:
            case Notice(kind, queue_position):
                assert (queue_position == 0) == (kind is NoticeKind.RESUMED)
            case Finished(index=place):
                assert place not in self._ended, f"result {place} ends twice"
                self._ended.add(place)
            case Piece(index=place) as piece:
                assert place not in self._ended, f"result {place} goes on after its end"
                self._received[place] += piece.token_ids

    def _check_journal(self) -> None:
        """What the frontend has accepted begins what was to be generated."""
        for index, (sequence, expected) in enumerate(
            zip(self._journal.sequences, self._reference.generated, strict=True)
        ):
            done, count = self._num_checked[index], len(sequence.token_ids)
            assert sequence.token_ids[done:] == expected[done:count], (
                f"sequence {index} of {self.plan.request_id} is {sequence.token_ids}, not the beginning of {expected}"
            )
            self._num_checked[index] = count

    def _check_whole(self) -> None:
        expected = [self._reference.delivered[index] for index in self._reference.order]
        assert self._received == expected, f"{self.plan.request_id} got {self._received}, not {expected}"
        assert self._ended == set(range(self.plan.num_results)), f"{self.plan.request_id} was not told every end"
        assert self._journal.prompt_logprobs == self._reference.prompt_logprobs, "other prompt logprobs"
        again = [emitted for batch in self._stream.told_after(0) for emitted in batch]
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
