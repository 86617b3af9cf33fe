"""What a generation tells the door it came through, in order: one `Started`, `Piece`s, one `Finished`, one `Usage`."""

import enum
from dataclasses import dataclass


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
    """The request is checked and its first token is there; `seed` is the one in force."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """New tokens, and the new text that is certain. Either may be empty, for text may wait for its next token."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Finished:
    """`match` is None where the limit ended it."""

    reason: FinishReason
    match: Match | None


@dataclass(frozen=True)
class Usage:
    """Counts in tokens, times in seconds."""

    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    cached_prompt_tokens: int
    time_to_first_token_s: float
    decode_time_s: float


Event = Started | Piece | Finished | Usage
