"""A fake model on a device that is never in a hurry: what a step samples is not known when the next one is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from octavo.testing.spoilable import SpoilableRunner
from octavo.wire.steps import BlockMoves
from octavo.worker.runner import StepOutput
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
    """Keeps the last token of every sequence to itself, as a device does. `fails`: the next step that is launched."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.launched: list[DeferredStep] = []
        self.fails = False
        self._tokens: dict[int, int] = {}

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> DeferredStep:  # type: ignore[override]
        copies, fails, self.fails = [_copied(item) for item in items], self.fails, False
        before = self.launched[-1] if self.launched else None
        self.launched.append(DeferredStep(lambda: self._compute(moves, copies, fails), before))
        return self.launched[-1]

    def _compute(self, moves: BlockMoves, items: list[WorkItem], fails: bool) -> StepOutput:
        if fails:
            raise RuntimeError("the device stumbled")
        for item in items:
            for sequence in item.members:
                self._resolve(sequence)
        output = self.execute(moves, items)
        self._tokens |= {each.sequence_id: each.token_id for each in output.sampled}
        return output

    def _resolve(self, sequence: WorkerSequence) -> None:
        while PENDING_TOKEN in sequence.token_ids:
            sequence.token_ids[sequence.token_ids.index(PENDING_TOKEN)] = self._tokens[sequence.sequence_id]


def _copied(item: WorkItem) -> WorkItem:
    members = tuple(each.fork(each.sequence_id, each.sequence_index) for each in item.members)
    return WorkItem(members[0], item.start, item.num_tokens, members if item.choosers else ())
