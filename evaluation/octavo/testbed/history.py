"""Defines the events of a run, of simulated processes or of real ones, which `octavo.testbed.judge` judges.

Times are seconds on one clock. A request is named by whatever tells it from all others that are open.
"""

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

Key = Hashable
# The text of a stream's `Notified` event when its worker is gone.
WORKER_LOST = "worker lost"


@dataclass(frozen=True)
class SequenceAnswer:
    """Holds one sequence of an answer: its tokens, and all else that is reported of it (text, logprobs, its end)."""

    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[object] = ()
    end: object = None


Answer = Sequence[SequenceAnswer]


@dataclass(frozen=True)
class Came:
    """Says that a client asks. `answer` is what an undisturbed run gives the client (None: nobody knows); `allowed`
    holds the errors that may come instead; by `start_by` the first step must have been planned, if any is to be."""

    time: float
    request: Key
    answer: Answer | None
    allowed: frozenset[str] = frozenset()
    start_by: float = inf


@dataclass(frozen=True)
class Notified:
    """Says that a stream brought an event that belongs to no choice."""

    time: float
    request: Key
    offset: int
    what: str = ""


@dataclass(frozen=True)
class Tokens:
    """Says that a stream brought more tokens of one choice."""

    time: float
    request: Key
    offset: int
    index: int
    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[object] = ()


@dataclass(frozen=True)
class ChoiceEnded:
    """Says that one choice of a stream ended."""

    time: float
    request: Key
    offset: int
    index: int
    end: object = None


@dataclass(frozen=True)
class Closed:
    """Says that the stream is over: whole, or with an error's reason, and what it says."""

    time: float
    request: Key
    error: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Left:
    """Says that the client has gone, and its request is of no use to anybody."""

    time: float
    request: Key


@dataclass(frozen=True)
class RequestsHeld:
    """Lists the requests that the scheduler holds; a request that it holds twice comes twice."""

    time: float
    requests: Sequence[Key]


@dataclass(frozen=True)
class Stepped:
    """Says that the scheduler plans a step with these requests."""

    time: float
    requests: frozenset[Key]


@dataclass(frozen=True)
class HeldLoad:
    """Counts the requests and blocks that are held for clients."""

    time: float
    requests: int
    blocks: int


@dataclass(frozen=True)
class Struck:
    """Says that a process is killed, stopped, or otherwise wronged."""

    time: float
    what: str


Event = Came | Notified | Tokens | ChoiceEnded | Closed | Left | RequestsHeld | Stepped | HeldLoad | Struck


class Wrong(enum.Enum):
    """Names the faults that a judge finds."""

    LOST = "something was lost"
    REPEATED = "something came twice"
    CHANGED = "something else came than in an undisturbed run"
    TWO_ENDS = "a choice ended twice"
    AFTER_END = "something came after the end"
    NO_END = "the end was not told"
    ERROR = "an error that nothing excuses"
    LATE = "work for a client whose time was up before it began"
    ZOMBIE = "work for a client that has gone"
    TWICE = "one request was admitted twice"
    LEAK = "something is held for nobody"


@dataclass(frozen=True)
class Violation:
    """Describes something that may not be."""

    wrong: Wrong
    time: float
    request: Key
    detail: str

    def __str__(self) -> str:
        return f"{self.time:.3f} {self.request}: {self.wrong.value}: {self.detail}"


@dataclass
class Aftermath:
    """Holds what the clients felt of one strike: when each was first notified of a lost worker, and the longest silence
    of each stream that had begun, in seconds."""

    strike: Struck
    noticed_s: dict[Key, float] = field(default_factory=dict)
    gap_s: dict[Key, float] = field(default_factory=dict)
