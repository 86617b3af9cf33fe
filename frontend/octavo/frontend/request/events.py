"""What a generation tells the door it came through, in order: one `Started`; `TextDelta`s, with one `Finished` after
the last of each sequence; one `Usage`. `Notice`s may come anywhere before that."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from octavo.frontend.request.logprob_table import num_numbers
from octavo.wire.requests import NoticeKind
from octavo.wire.sampling import Logprobs


class FinishReason(enum.Enum):
    """A stop string, a stop token or EOS; or the limit of new tokens."""

    STOP = enum.auto()
    LENGTH = enum.auto()


class MatchKind(enum.Enum):
    """What ended a generation that did not run into its limit."""

    STOP_STRING = enum.auto()
    STOP_TOKEN = enum.auto()
    EOS_TOKEN = enum.auto()


@dataclass(frozen=True)
class Match:
    """`value` is the stop string, or the token id in the two other kinds."""

    kind: MatchKind
    value: str | int


@dataclass(frozen=True)
class Started:
    """The request is checked and its first token is there; `seed` is the one in force. `prompt_logprobs`, if asked for,
    has one entry for each prompt token but the first."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    seed: int
    prompt_logprobs: Sequence[Logprobs]


class TextDelta(msgspec.Struct, frozen=True):
    """New tokens of a sequence, and the new text that is certain. Either may be empty, for text may wait for its next
    token. `logprobs` has one entry per token where the scheduler was asked for them."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[Logprobs] = ()
    index: int = 0


@dataclass(frozen=True)
class Finished:
    """`match` is None where the limit ended the sequence; `cumulative_logprob` where nobody asked for logprobs."""

    reason: FinishReason
    match: Match | None
    cumulative_logprob: float | None = None
    index: int = 0


@dataclass(frozen=True)
class Usage:
    """Counts in tokens, times in seconds."""

    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    swaps: int
    cached_prompt_tokens: int
    time_to_first_token_s: float
    decode_time_s: float


@dataclass(frozen=True)
class Notice:
    """Progress that is no output. `queue_position` counts from 1 on where the request waits in the queue, and is 0
    elsewhere."""

    kind: NoticeKind
    queue_position: int = 0


Event = Started | TextDelta | Finished | Usage | Notice
# Logprobs that are written in less than a millisecond: entries of a prompt, and of a piece all numbers.
FEW_LOGPROBS: Final = 64
_FEW_NUMBERS: Final = 512


def is_long(event: Event) -> bool:
    """Whether writing it for a client takes so long (a second, with the logprobs of a long prompt) that it is to be
    done off the event loop."""
    if isinstance(event, TextDelta):
        return bool(event.logprobs) and num_numbers(event.logprobs) > _FEW_NUMBERS
    return isinstance(event, Started) and len(event.prompt_logprobs) > FEW_LOGPROBS


class Emitted(NamedTuple):
    """An event and its place in its request's stream: offsets grow strictly, from 1 on."""

    offset: int
    event: Event
