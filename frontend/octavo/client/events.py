"""What a stream tells, in order: one `Started`; `Delta`s, with one `Finished` after the last of each sequence; one
`Usage`, the last. `Notice`s may come anywhere, before `Started` too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# "other" is one that this client is too old to know.
FinishReason = Literal["stop", "length", "other"]
NoticeKind = Literal["queued", "preempted", "resumed", "worker_lost"]


@dataclass(frozen=True)
class Candidate:
    """One of the likeliest tokens of a place; `piece` is the bytes it stands for, which may be part of a character."""

    token_id: int
    logprob: float
    piece: bytes = b""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token with its natural logprob and its rank, 1 being the likeliest; `top` in falling order."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[Candidate] = ()
    piece: bytes = b""


@dataclass(frozen=True)
class Started:
    """The first token is there. `seed` is the one in force: given or drawn. `prompt_logprobs`, where asked for, has one
    entry for every prompt token but the first."""

    offset: int
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of the sequence `index`, and the text that is certain: whole characters only. Either may be empty."""

    offset: int
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Finished:
    """A sequence has ended. `stop_reason` is the stop string or the stop token that ended it; None at EOS and at the
    limit."""

    offset: int
    index: int
    reason: FinishReason
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Usage:
    """Counts in tokens, of all sequences together; times in seconds."""

    offset: int
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    swaps: int
    time_to_first_token_s: float
    decode_time_s: float


@dataclass(frozen=True)
class Notice:
    """Progress that is no output. `queue_position` counts from 1 on, where the request waits in the queue."""

    offset: int
    kind: NoticeKind
    queue_position: int | None = None


Event = Started | Delta | Finished | Usage | Notice
