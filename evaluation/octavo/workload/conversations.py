"""Conversations: jobs that come one after the other, and what became of each turn."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.workload.job import Job
from octavo.workload.measures import Served, Spread, time_text

_Each = TypeVar("_Each")


class LaterTurns(Generic[_Each]):
    """Keeps what belongs to later turns of conversations until the turn before has ended."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[tuple[Job, _Each]]] = defaultdict(list)

    def hold(self, job: Job, each: _Each) -> bool:
        """Keeps what belongs to the job if another turn comes before it; tells whether it was kept."""
        if job.turn > 1:
            self._waiting[job.conversation].append((job, each))
        return job.turn > 1

    def after(self, job: Job) -> tuple[Job, _Each] | None:
        """Takes the turn that comes next, now that this one has ended; None if there is none."""
        waiting = self._waiting.get(job.conversation, []) if job.turn else []
        found = min(waiting, key=lambda each: each[0].turn, default=None)
        if found is not None:
            waiting.remove(found)
        return found


@dataclass(frozen=True)
class TurnSummary:
    """Sums up the requests that were number `turn` of their conversations: the tokens of their prompts, those of them
    that were not found computed, and the times to their first tokens (None: none has come)."""

    turn: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    ttft: Spread | None


def by_turn(served: Iterable[Served]) -> list[TurnSummary]:
    """Returns a summary for each turn, in their order; none where no request is of a conversation. What got no token is
    left out."""
    turns: defaultdict[int, list[Served]] = defaultdict(list)
    for each in served:
        if each.job.turn and each.first_token_s is not None:
            turns[each.job.turn].append(each)
    return [_summary(turn, turns[turn]) for turn in sorted(turns)]


def _summary(turn: int, served: Sequence[Served]) -> TurnSummary:
    prompt_tokens = sum(each.job.prompt_tokens for each in served)
    return TurnSummary(
        turn=turn,
        requests=len(served),
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens - sum(each.cached_tokens for each in served),
        ttft=Spread.of([each.ttft for each in served if each.ttft is not None]),
    )


def turns_text(turns: Sequence[TurnSummary]) -> list[str]:
    """Returns a table for people; nothing for nothing."""
    if not turns:
        return []
    head = ("turn", "requests", "prompts", "computed", "ttft p50", "ttft p99")
    return ["".join(f"{cell:>{width}}" for cell, width in zip(head, _WIDTHS, strict=True)), *map(_line, turns)]


_WIDTHS = (6, 10, 12, 20, 10, 10)


def _line(turn: TurnSummary) -> str:
    share = turn.computed_tokens / turn.prompt_tokens
    times = [time_text(turn.ttft.p50), time_text(turn.ttft.p99)] if turn.ttft else ["-", "-"]
    cells = (turn.turn, turn.requests, turn.prompt_tokens, f"{turn.computed_tokens} ({share:.0%})", *times)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def found_text(prompt_tokens: int, found: Mapping[str, int]) -> str:
    """Says how many of the prompts' tokens were computed, and in which tier the others were found."""
    computed = prompt_tokens - sum(found.values())
    share = f" ({computed / prompt_tokens:.1%})" if prompt_tokens else ""
    places = ", ".join(f"{count} {tier}" for tier, count in found.items() if count) or "none"
    return f"of {prompt_tokens} tokens of prompts {computed}{share} were computed; found, by tier: {places}"
