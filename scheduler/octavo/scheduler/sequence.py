"""Requests as the scheduler sees them: groups of sequences, what of them is known, planned and computed."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.wire import history
from octavo.wire.requests import FinishReason, Request


class SequenceStatus(enum.Enum):
    """Where a sequence is. (Why it finished is its `finish_reason`.)"""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt.

    Its tokens are the *known* ones (prompt and generated) and, after them, `num_in_flight` that outstanding steps
    sample. The first `num_computed` of all these have their KV computed, or planned in an outstanding step.
    `sequence_id` names one stay on one replica: it is drawn anew at every admission.
    """

    index: int
    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    history_hash: int
    # Of its full blocks, by block size (`octavo.scheduler.prefix_cache`).
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    sequence_id: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_in_flight: int = 0
    # The last step planned with it.
    last_step_id: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    def token_id(self, position: int) -> int:
        """A known token."""
        generated = position - len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if generated < 0 else self.generated_token_ids[generated]

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes just the token sampled last."""
        return self.num_uncomputed == 1 and self.num_computed >= self.num_prompt

    def append(self, token_id: int) -> None:
        """A token comes back from a step."""
        self.generated_token_ids.append(token_id)
        self.history_hash = history.extend(self.history_hash, (token_id,))
        self.num_in_flight -= 1

    def restart(self) -> None:
        """Back to waiting with its known tokens; nothing of them is computed any more (paper §4.5, recomputation)."""
        self.status = SequenceStatus.WAITING
        self.num_computed = 0
        self.num_in_flight = 0


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences: what is admitted, preempted and aborted as one."""

    request: Request
    frontend_id: int
    # Scheduler's clock; earlier for a request that was submitted before.
    arrival: float
    # Counts submissions: the order of those that arrived at one time.
    serial: int
    sequences: list[Sequence]
    preemptions: int = 0
    # Prompt tokens that its first admission found computed; None before that.
    cached_prompt_tokens: int | None = None
    failed_steps: int = 0
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.request.sampling.stop_token_ids)

    @classmethod
    def of(cls, request: Request, frontend_id: int, now: float, serial: int) -> "SequenceGroup":
        """The group of a request that arrived `request.age_ms` ago, resuming after its generated tokens."""
        generated = list(request.generated_token_ids)
        sequence = Sequence(
            index=0,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=generated,
            history_hash=history.extend(history.EMPTY, generated),
        )
        return cls(request, frontend_id, now - request.age_ms / 1000.0, serial, [sequence])

    @property
    def order(self) -> tuple[float, int]:
        """First come, first served."""
        return self.arrival, self.serial

    @property
    def live(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED)

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    @property
    def worst_case_tokens(self) -> int:
        """Tokens its KV can grow to, nothing shared."""
        longest = len(self.request.prompt_token_ids) + self.request.sampling.max_tokens
        return longest * len(self.sequences)

    def may_compute(self, sequence: Sequence) -> int:
        """How many tokens of `sequence` a step may compute now.

        None once the tokens in flight reach `max_tokens`: whatever they are, it ends with them.
        """
        if len(sequence.generated_token_ids) + sequence.num_in_flight >= self.request.sampling.max_tokens:
            return 0
        return sequence.num_uncomputed

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the token that `sequence` ends with now is its last, and why."""
        if sequence.generated_token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(sequence.generated_token_ids) >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
