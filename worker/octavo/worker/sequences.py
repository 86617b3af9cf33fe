"""The sequences that a worker keeps between steps, and the share of one sequence in a step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.runtime.telemetry.tracing import NOTHING, Span
from octavo.wire.pooling import PoolingParams
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import SequenceFailure

if TYPE_CHECKING:
    # These modules take numpy and llguidance, which few sequences need.
    from octavo.worker.sampling.grammars import GrammarProgress
    from octavo.worker.sampling.logits_processors import LogitEdits


# Stands in a sequence's tokens for one that a step under way samples: only the device knows it yet.
PENDING_TOKEN = -1


@dataclass(slots=True)
class WorkerSequence:
    """One sequence as the worker keeps it.

    `token_ids` holds the prompt, then the generated tokens, of which the last may be `PENDING_TOKEN`. `num_computed`
    counts the tokens whose keys and values are in the blocks of `block_tables`, or will be once the steps under way are
    done. There is one table per KV group, from logical to physical block, with `NULL_BLOCK` where a sliding window has
    passed.

    With `pooling` the sequence gets an output of the model once all its tokens are computed, and no token follows.

    `is_drafted` tells that a step under way checks a draft of its next tokens, or proposes one: until that is done it
    is open how many tokens, and blocks, it has.

    The sampler keeps derived state here: `edits` of the logits and the `follower` of the grammar. A device keeps
    `num_sent`: for each block table, the number of leading entries that it has been sent and that have not changed
    since. `failure` tells why the sequence cannot go on; steps under way may still hold it.
    """

    sequence_id: int
    sequence_index: int
    sampling: SamplingParams
    prompt_length: int
    token_ids: list[int]
    num_computed: int
    block_tables: list[list[int]]
    is_drafted: bool = field(default=False, repr=False, compare=False)
    edits: "LogitEdits | None" = field(default=None, repr=False, compare=False)
    follower: "GrammarProgress | None" = field(default=None, repr=False, compare=False)
    num_sent: list[int] = field(default_factory=list, repr=False, compare=False)
    failure: SequenceFailure | None = field(default=None, repr=False, compare=False)
    span: Span = field(default=NOTHING, repr=False, compare=False)
    pooling: PoolingParams | None = None

    @property
    def samples(self) -> bool:
        """Tells whether the sequence chooses its next token itself, from its last row: a beam's is chosen for it."""
        return self.sampling.beam is None and self.pooling is None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def has_pending_token(self) -> bool:
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def reads_generated(self) -> bool:
        """Tells whether the CPU needs the values of all generated tokens to choose the next one."""
        return bool(self.sampling.grammar)

    def mark_unsent(self, group: int, logical_index: int) -> None:
        """Notes that the entry `logical_index` of the block table of `group` has changed since it was sent to the
        device."""
        if self.num_sent:
            self.num_sent[group] = min(self.num_sent[group], logical_index)

    def fork(self, sequence_id: int, sequence_index: int) -> "WorkerSequence":
        """Returns a copy with tokens and tables of its own, under another id and index."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Chooser:
    """A sequence that chooses what follows its tokens and the first `num_drafted` of its `draft`, as if it had
    generated these."""

    sequence: WorkerSequence
    draft: list[int] = field(default_factory=list)
    num_drafted: int = 0

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def num_generated(self) -> int:
        return self.sequence.num_generated + self.num_drafted

    @property
    def drafted(self) -> list[int]:
        """Returns the drafted tokens that count as generated."""
        return self.draft[: self.num_drafted]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One sequence's share of a step: the positions `start` to `start + num_tokens - 1`.

    If the item reaches the last known token, the row of that token chooses the next one for each of the `choosers`: the
    sequence itself, then its followers, which have the same tokens and tables. Otherwise there are no choosers.

    The last positions may hold a `draft` of what follows the last known token. Then there is one chooser, and each row
    of the draft chooses too, as if the draft were right so far. `num_proposed` is how many tokens a draft model is to
    guess of what follows those that the item brings, to its one chooser; the sequence's blocks have room for them.
    """

    sequence: WorkerSequence
    start: int
    num_tokens: int
    choosers: tuple[WorkerSequence, ...]
    draft: list[int] = field(default_factory=list)
    num_proposed: int = 0

    @property
    def end(self) -> int:
        """Returns the position after the last one."""
        return self.start + self.num_tokens

    @property
    def num_known(self) -> int:
        """Returns the number of positions whose tokens are no guesses."""
        return self.num_tokens - len(self.draft)

    @property
    def known_end(self) -> int:
        """Returns the position after the last one whose token is no guess."""
        return self.end - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """Returns the tokens at the positions, the draft included."""
        return self.sequence.token_ids[self.start : self.known_end] + self.draft

    @property
    def looks_ahead(self) -> bool:
        """Tells whether the sequence has blocks for guesses, which it keeps as far as they come true."""
        return bool(self.draft or self.num_proposed)

    def without_draft(self) -> "WorkItem":
        """Returns the item with neither a draft nor a proposal."""
        return WorkItem(self.sequence, self.start, self.num_known, self.choosers)

    @property
    def members(self) -> tuple[WorkerSequence, ...]:
        """Returns all sequences whose `num_computed` advances with this item."""
        return self.choosers or (self.sequence,)
