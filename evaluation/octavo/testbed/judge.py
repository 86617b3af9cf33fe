"""Judges what must never happen in a run, of simulated and of real processes alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from octavo.testbed.history import (
    WORKER_LOST,
    Aftermath,
    Answer,
    Came,
    ChoiceEnded,
    Closed,
    Event,
    HeldLoad,
    Key,
    Left,
    Notified,
    RequestsHeld,
    SequenceAnswer,
    Stepped,
    Struck,
    Tokens,
    Violation,
    Wrong,
)
from octavo.wire.history import EMPTY, extend

# How far a scheduler may go on with a request that nobody waits for any more: so many steps, or so long.
ZOMBIE_STEPS = 2
ZOMBIE_S = 0.2
# A gap that begins later than this after a strike has another cause.
_AFTERMATH_S = 5.0


@dataclass
class _Received:
    """Holds what has come of one choice. `chain` is the rolling hash of its tokens, `due` that of the expected
    tokens."""

    count: int = 0
    chain: int = EMPTY
    due: int = EMPTY
    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    has_ended: bool = False
    is_wrong: bool = False


@dataclass
class _Stream:
    """Holds an open request as its client sees it."""

    came: Came
    offset: int = 0
    choices: dict[int, _Received] = field(default_factory=dict)
    token_at: float | None = None

    def choice(self, index: int) -> _Received:
        return self.choices.setdefault(index, _Received())


@dataclass
class _Gone:
    """Holds the time since which nobody waits for a request (its client `has_left`, or was served), and how many steps
    the request has had since."""

    time: float
    has_left: bool = False
    steps: int = 0
    is_known: bool = False


class Judge:
    """Takes events in the order of their times, but for steps, which may come at the end. `held_s`: how long a
    scheduler may hold what nobody waits for; `zombie_s`: how long there may be steps for it."""

    def __init__(self, *, held_s: float = inf, zombie_s: float = ZOMBIE_S) -> None:
        self.faults: list[Violation] = []
        self.aftermaths: list[Aftermath] = []
        self.num_whole = 0
        # The latest step for a client that had gone, in seconds after it went.
        self.latest_step_s = 0.0
        self._held_s = held_s
        self._zombie_s = zombie_s
        self._open: dict[Key, _Stream] = {}
        self._gone: dict[Key, _Gone] = {}
        # Of those that have had no step yet.
        self._start_by: dict[Key, float] = {}
        self._load: HeldLoad | None = None

    @property
    def num_open(self) -> int:
        """Streams that have neither been closed nor left."""
        return len(self._open)

    def take(self, event: Event) -> None:
        """Notes what is wrong with one more event, if anything is."""
        match event:
            case Came():
                self._gone.pop(event.request, None)
                self._open[event.request] = _Stream(event)
                self._start_by[event.request] = event.start_by
            case Notified() | Tokens() | ChoiceEnded():
                self._streamed(event)
            case Closed():
                self._closed(event)
            case Left(time, request):
                self._open.pop(request, None)
                self._gone.setdefault(request, _Gone(time, has_left=True))
            case RequestsHeld():
                self._held(event)
            case Stepped():
                self._stepped(event)
            case HeldLoad():
                self._load = event
            case Struck():
                self.aftermaths.append(Aftermath(event))

    def end(self, time: float) -> None:
        """Ends the run: every stream has an end, and nothing is held."""
        for request in self._open:
            self._fault(Wrong.NO_END, time, request, "the stream is still open")
        if self._load is None:
            self._fault(Wrong.LEAK, time, None, "nobody has looked at the load")
        elif self._load.requests or self._load.blocks:
            self._fault(Wrong.LEAK, time, None, f"{self._load.requests} requests and {self._load.blocks} blocks")

    def _fault(self, wrong: Wrong, time: float, request: Key, detail: str) -> None:
        self.faults.append(Violation(wrong, time, request, detail))

    # -- streams ----------------------------------------------------------------------------------------------------

    def _streamed(self, event: Notified | Tokens | ChoiceEnded) -> None:
        stream = self._open.get(event.request)
        if stream is None:
            if not self._has_left(event.request):
                self._fault(Wrong.AFTER_END, event.time, event.request, f"{event}")
            return
        if event.offset != stream.offset + 1:
            wrong = Wrong.LOST if event.offset > stream.offset else Wrong.REPEATED
            self._fault(wrong, event.time, event.request, f"event {event.offset} after event {stream.offset}")
        stream.offset = event.offset
        match event:
            case Tokens():
                self._tokens(stream, event)
            case ChoiceEnded():
                self._choice_ended(stream, event)
            case Notified(what=what) if what == WORKER_LOST and self.aftermaths:
                aftermath = self.aftermaths[-1]
                aftermath.noticed_s.setdefault(event.request, event.time - aftermath.strike.time)

    def _tokens(self, stream: _Stream, event: Tokens) -> None:
        self._measure(stream, event)
        received = stream.choice(event.index)
        if received.has_ended:
            self._fault(Wrong.AFTER_END, event.time, event.request, f"more of choice {event.index}")
        before = received.count
        received.count += len(event.token_ids)
        received.chain = extend(received.chain, event.token_ids)
        received.text += event.text
        received.logprobs += event.logprobs
        if stream.came.answer is None or received.is_wrong:
            return
        expected = _choice(stream.came.answer, event.index).token_ids
        received.due = extend(received.due, expected[before : received.count])
        if received.chain != received.due or received.count > len(expected):
            received.is_wrong = True
            where = f"choice {event.index}, {list(event.token_ids)} from token {before} on"
            self._fault(_compare(expected, before, event.token_ids), event.time, event.request, where)

    def _measure(self, stream: _Stream, event: Tokens) -> None:
        if self.aftermaths and stream.token_at is not None:
            aftermath = self.aftermaths[-1]
            if stream.token_at <= aftermath.strike.time + _AFTERMATH_S:
                gap_s = max(aftermath.gap_s.get(event.request, 0.0), event.time - stream.token_at)
                aftermath.gap_s[event.request] = gap_s
        stream.token_at = event.time

    def _choice_ended(self, stream: _Stream, event: ChoiceEnded) -> None:
        received = stream.choice(event.index)
        if received.has_ended:
            self._fault(Wrong.TWO_ENDS, event.time, event.request, f"choice {event.index}")
            return
        received.has_ended = True
        if stream.came.answer is None or received.is_wrong:
            return
        expected = _choice(stream.came.answer, event.index)
        where = f"choice {event.index}"
        if received.count < len(expected.token_ids):
            detail = f"{where} has {received.count} of {len(expected.token_ids)} tokens"
            self._fault(Wrong.LOST, event.time, event.request, detail)
        elif (received.text, received.logprobs, event.end) != (expected.text, list(expected.logprobs), expected.end):
            detail = f"{where}: {received.text!r}, {received.logprobs}, {event.end} instead of {expected}"
            self._fault(Wrong.CHANGED, event.time, event.request, detail)

    def _closed(self, event: Closed) -> None:
        stream = self._open.pop(event.request, None)
        self._gone.setdefault(event.request, _Gone(event.time))
        if stream is None:
            if not self._has_left(event.request):
                self._fault(Wrong.TWO_ENDS, event.time, event.request, f"closed again: {event.error}")
        elif event.error:
            if event.error not in stream.came.allowed:
                self._fault(Wrong.ERROR, event.time, event.request, f"{event.error} {event.detail}")
        else:
            self._check_ends(stream, event)

    def _has_left(self, request: Key) -> bool:
        """Tells whether nobody reads what still comes for the request."""
        return request in self._gone and self._gone[request].has_left

    def _check_ends(self, stream: _Stream, event: Closed) -> None:
        self.num_whole += 1
        answer = stream.came.answer
        indices = stream.choices.keys() if answer is None else range(len(answer))
        for index in sorted({*indices, *stream.choices}):
            if not stream.choice(index).has_ended:
                self._fault(Wrong.NO_END, event.time, event.request, f"choice {index}")

    # -- the scheduler ----------------------------------------------------------------------------------------------

    def _held(self, event: RequestsHeld) -> None:
        for request, count in Counter(event.requests).items():
            if count > 1:
                self._fault(Wrong.TWICE, event.time, request, f"held {count} times")
            gone = self._gone.get(request)
            if gone and event.time - gone.time > self._held_s:
                self._zombie(gone, event.time, request, "still held")

    def _stepped(self, event: Stepped) -> None:
        for request in event.requests & self._start_by.keys():
            late_s = event.time - self._start_by.pop(request)
            if late_s > 0:
                self._fault(Wrong.LATE, event.time, request, f"its first step is planned {late_s:.3f} s too late")
        for request in event.requests & self._gone.keys():
            gone = self._gone[request]
            late_s = event.time - gone.time
            if late_s <= 0:
                continue
            gone.steps += 1
            self.latest_step_s = max(self.latest_step_s, late_s)
            if gone.steps > ZOMBIE_STEPS and late_s > self._zombie_s:
                self._zombie(gone, event.time, request, f"{gone.steps} steps")

    def _zombie(self, gone: _Gone, time: float, request: Key, what: str) -> None:
        if not gone.is_known:
            gone.is_known = True
            self._fault(Wrong.ZOMBIE, time, request, f"{what}, {time - gone.time:.2f} s after it went")


def judge(events: Sequence[Event]) -> Judge:
    """Returns the judge who has seen all of a run, in the order of its times."""
    seen = Judge()
    for event in sorted(events, key=lambda event: event.time):
        seen.take(event)
    seen.end(max((event.time for event in events), default=0.0))
    return seen


def _choice(answer: Answer, index: int) -> SequenceAnswer:
    return answer[index] if 0 <= index < len(answer) else SequenceAnswer(())


def _compare(expected: Sequence[int], position: int, token_ids: Sequence[int]) -> Wrong:
    """Tells how tokens that do not stand at `position` got there: from earlier places, from later ones, or from no
    place of the answer."""
    found, count = list(token_ids), len(token_ids)
    places = [place for place in range(len(expected)) if list(expected[place : place + count]) == found]
    if any(place < position for place in places):
        return Wrong.REPEATED
    return Wrong.LOST if places else Wrong.CHANGED
