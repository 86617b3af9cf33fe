"""What a worker knows of its sequences between steps, and how a plan changes it.

The table checks a plan before any of it reaches the device: an id that is out of range there would write into a
neighbour's memory instead of raising.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import SequenceStart, SequenceWork, StepPlan


class PlanError(Exception):
    """A plan that contradicts what the worker holds; nothing of it may run."""


@dataclass(slots=True)
class WorkerSequence:
    """One sequence as the worker keeps it. `token_ids` is prompt then generated; `num_computed` counts those whose keys
    and values are in the blocks of `block_ids` (the block table: logical to physical)."""

    sequence_id: int
    sequence_index: int
    sampling: SamplingParams
    prompt_length: int
    token_ids: list[int]
    num_computed: int
    block_ids: list[int]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One sequence's share of a step: the positions `start` to `start + num_tokens - 1`.

    `samples` says that it reaches the last known token, so that the row of that token chooses the next one.
    """

    sequence: WorkerSequence
    start: int
    num_tokens: int
    samples: bool


class SequenceTable:
    """The sequences of one incarnation, by id."""

    def __init__(self, *, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._sequences: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def apply(self, plan: StepPlan) -> list[WorkItem]:
        """Forgets, starts and grows block tables as `plan` says; the work in its order.

        Forgetting an unknown sequence is no error: after a failure the scheduler cannot tell which starts were seen.
        Raises `PlanError` on any other contradiction; the caller then discards the plan.
        """
        self._forget(plan.forget)
        for start in plan.starts:
            self._start(start)
        items = [self._grow(work) for work in plan.work]
        if len({item.sequence.sequence_id for item in items}) != len(items):
            raise PlanError("a sequence has two shares of one step")
        return items

    def complete(self, items: list[WorkItem], sampled_ids: list[int]) -> None:
        """Records that `items` were computed; `sampled_ids` holds one token per item that samples, in order.

        Raises `ValueError` if their number or range is wrong, which is the runner's fault and not the plan's.
        """
        sampling = [item.sequence for item in items if item.samples]
        if len(sampled_ids) != len(sampling) or not self._in_vocabulary(sampled_ids):
            raise ValueError(
                f"the runner returned {len(sampled_ids)} tokens for {len(sampling)} sampling sequences,"
                f" or one outside the vocabulary of {self._vocab_size}"
            )
        for item in items:
            item.sequence.num_computed += item.num_tokens
        for sequence, token_id in zip(sampling, sampled_ids, strict=True):
            sequence.token_ids.append(token_id)

    def discard(self, plan: StepPlan) -> None:
        """Forgets all that a failed or skipped `plan` names: the scheduler starts every one of them anew."""
        self._forget(plan.forget)
        self._forget(start.sequence_id for start in plan.starts)
        self._forget(work.sequence_id for work in plan.work)

    def clear(self) -> None:
        """Forgets everything, as a new incarnation does."""
        self._sequences.clear()

    def __iter__(self) -> Iterator[WorkerSequence]:
        return iter(self._sequences.values())

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def _start(self, start: SequenceStart) -> None:
        name = f"sequence {start.sequence_id:#x}"
        if start.sequence_id in self._sequences:
            raise PlanError(f"{name} is started twice")
        token_ids = start.prompt_token_ids + start.generated_token_ids
        if not start.prompt_token_ids:
            raise PlanError(f"{name} starts without a prompt")
        if start.num_computed >= len(token_ids):
            raise PlanError(
                f"{name} starts with {start.num_computed} of {len(token_ids)} tokens computed: none is left"
            )
        if not self._in_vocabulary(token_ids):
            raise PlanError(f"{name} has a token id outside the vocabulary of {self._vocab_size}")
        self._sequences[start.sequence_id] = WorkerSequence(
            start.sequence_id,
            start.sequence_index,
            start.sampling,
            len(start.prompt_token_ids),
            token_ids,
            start.num_computed,
            [],
        )

    def _grow(self, work: SequenceWork) -> WorkItem:
        sequence = self._sequences.get(work.sequence_id)
        if sequence is None:
            raise PlanError(f"sequence {work.sequence_id:#x} is unknown")
        self._extend_table(sequence, work.new_block_ids)
        start = sequence.num_computed
        end = start + work.num_tokens
        self._check_end(sequence, end)
        return WorkItem(sequence, start, work.num_tokens, samples=end == len(sequence.token_ids))

    def _extend_table(self, sequence: WorkerSequence, block_ids: list[int]) -> None:
        if not block_ids:
            return
        if min(block_ids) < 0 or max(block_ids) >= self._num_blocks:
            raise PlanError(
                f"sequence {sequence.sequence_id:#x} is given blocks {min(block_ids)} to {max(block_ids)};"
                f" there are {self._num_blocks}"
            )
        sequence.block_ids.extend(block_ids)
        if len(set(sequence.block_ids)) != len(sequence.block_ids):
            raise PlanError(f"sequence {sequence.sequence_id:#x} holds a block twice")

    def _check_end(self, sequence: WorkerSequence, end: int) -> None:
        for limit, what in (
            (len(sequence.token_ids), "known tokens"),
            (len(sequence.block_ids) * self._block_size, "slots in its blocks"),
            (self._max_model_len, "positions in the model"),
        ):
            if end > limit:
                raise PlanError(f"sequence {sequence.sequence_id:#x} is to reach {end} tokens; it has {limit} {what}")

    def _in_vocabulary(self, token_ids: list[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)
