"""A fake model on a device that is never in a hurry: what a step samples is not known when the next one is launched."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.wire.steps import BlockMoves
from octavo.worker.kv_store.loan import Parts
from octavo.worker.runner import BlockContents, Settle, StepOutput, nothing_pending
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem


@dataclass(eq=False)
class DeferredStep:
    """Computed when its output is asked for, after those launched before it; `ready` once the test has said so."""

    compute: Callable[[], StepOutput]
    before: Self | None
    is_ready: bool = False
    _outcome: StepOutput | Exception | None = None

    def ready(self) -> bool:
        return self.is_ready

    def output(self) -> StepOutput:
        self.settle()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def settle(self) -> None:
        """Computes it, unless that has been done."""
        if self._outcome is not None:
            return
        if self.before is not None:
            self.before.settle()
        try:
            self._outcome = self.compute()
        except Exception as error:
            self._outcome = error


class DeferredRunner(SpoilableRunner):
    """Keeps the last token of every sequence to itself, as a device does, and `holds` something of each that it was
    not told to forget. `fails`, and `to_spoil`: the next step that is launched."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.launched: list[DeferredStep] = []
        self.holds: set[int] = set()
        self.fails = False
        self._tokens: dict[int, int] = {}
        self._to_copy: list[Callable[[], None]] = []

    def launch(  # type: ignore[override]
        self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending
    ) -> DeferredStep:
        if any(member.reads_generated and member.has_pending_token for item in items for member in item.choosers):
            settle()
            assert all(not each.has_pending_token or each.failure for item in items for each in item.choosers)
        to_copy, self._to_copy = self._to_copy, []
        copies, fails, self.fails = [_copied(item) for item in items], self.fails, False
        self.holds.update(member.sequence_id for item in items for member in item.members)
        spoiled = self.to_spoil
        before = self.launched[-1] if self.launched else None
        self.launched.append(DeferredStep(lambda: self._compute(moves, copies, spoiled, fails, to_copy), before))
        return self.launched[-1]

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self.holds.difference_update(sequence_ids)

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents:
        contents, copies = super().read_blocks(block_ids), list[Parts]()
        self._to_copy.append(
            lambda: copies.extend([memoryview(bytes(part)) for part in parts] for parts in contents.blocks())
        )
        return BlockContents(False, lambda: copies, contents.is_sound)

    def _compute(
        self,
        moves: BlockMoves,
        items: list[WorkItem],
        spoiled: Collection[int],
        fails: bool,
        to_copy: list[Callable[[], None]],
    ) -> StepOutput:
        for copy in to_copy:
            copy()
        if fails:
            raise RuntimeError("the device stumbled")
        for item in items:
            for sequence in item.members:
                self._resolve(sequence)
        later, self.to_spoil = self.to_spoil, spoiled
        output = self.execute(moves, items)
        self.to_spoil = later
        self._tokens |= {each.sequence_id: each.token_id for each in output.sampled}
        self._tokens |= {each.sequence_id: each.token_ids[-1] for each in output.further}
        return output

    def _resolve(self, sequence: WorkerSequence) -> None:
        """One that has failed goes on with whatever stands where its token should."""
        token_ids = sequence.token_ids
        token_ids[:] = [self._tokens.get(sequence.sequence_id, 0) if t == PENDING_TOKEN else t for t in token_ids]


def _copied(item: WorkItem) -> WorkItem:
    members = tuple(each.fork(each.sequence_id, each.sequence_index) for each in item.members)
    return WorkItem(
        members[0], item.start, item.num_tokens, members if item.choosers else (), item.draft, item.num_proposed
    )
