"""What a worker knows of one sequence between steps, and that sequence's share of a step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.runtime.telemetry.tracing import NOTHING, Span
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import SequenceFailure

if TYPE_CHECKING:
    # They take numpy and llguidance, which few sequences need.
    from octavo.worker.sampling.grammars import Follower
    from octavo.worker.sampling.logits_processors import LogitEdits


# Stands in a sequence's tokens for one that a step under way samples: only the device knows it yet.
PENDING_TOKEN = -1


@dataclass(slots=True)
class WorkerSequence:
    """One sequence as the worker keeps it. `token_ids` is prompt then generated, of which the last may be
    `PENDING_TOKEN`s; `num_computed` counts those whose keys and values are in the blocks of `block_tables` (logical to
    physical, one table per KV group; `NULL_BLOCK` where a sliding window has passed), or will be once the steps under
    way are done. `edits` and the `follower` of its grammar are the sampler's: what of the above it needs in another
    form; and `num_told` a device's: of how many entries of each block table it has been told, which have not changed
    since. `failure`: why it cannot go on, though steps under way may still hold it."""

    sequence_id: int
    sequence_index: int
    sampling: SamplingParams
    prompt_length: int
    token_ids: list[int]
    num_computed: int
    block_tables: list[list[int]]
    edits: "LogitEdits | None" = field(default=None, repr=False, compare=False)
    follower: "Follower | None" = field(default=None, repr=False, compare=False)
    num_told: list[int] = field(default_factory=list, repr=False, compare=False)
    failure: SequenceFailure | None = field(default=None, repr=False, compare=False)
    span: Span = field(default=NOTHING, repr=False, compare=False)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def has_pending_token(self) -> bool:
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def reads_generated(self) -> bool:
        """Whether choosing its next token takes the values of those before, and not just their number."""
        sampling = self.sampling
        penalties = sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty
        return any(penalties) or bool(sampling.grammar)

    def untell(self, group: int, logical_index: int) -> None:
        """An entry of a block table is another from now on."""
        if self.num_told:
            self.num_told[group] = min(self.num_told[group], logical_index)

    def fork(self, sequence_id: int, sequence_index: int) -> "WorkerSequence":
        """A copy with tokens and tables of its own, under another id and index."""
        return WorkerSequence(
            sequence_id,
            sequence_index,
            self.sampling,
            self.prompt_length,
            list(self.token_ids),
            self.num_computed,
            [list(table) for table in self.block_tables],
        )

    def __str__(self) -> str:
        return f"sequence {self.sequence_id:#x}"


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One sequence's share of a step: the positions `start` to `start + num_tokens - 1`.

    If it reaches the last known token, the row of that token chooses the next one for each of the `choosers`: the
    sequence itself, then its followers, which have the same tokens and tables. Otherwise there are none.
    """

    sequence: WorkerSequence
    start: int
    num_tokens: int
    choosers: tuple[WorkerSequence, ...]

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.num_tokens

    @property
    def members(self) -> tuple[WorkerSequence, ...]:
        """All sequences that count as computed with this item."""
        return self.choosers or (self.sequence,)
