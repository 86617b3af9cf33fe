"""A fake model in whose cache NaNs can be planted: every query that sees one fails, as in a real model."""

from array import array
from collections.abc import Collection

from octavo.wire.steps import Candidates, PromptLogprobs, SampledToken, SequenceFailure
from octavo.worker.failures import not_finite
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.sequences import WorkItem

# Stands for the keys and values of a token that are not finite.
_NAN = -3


class SpoilableRunner(FakeRunner):
    """What the next step computes first of the sequences named in `to_spoil` is NaN."""

    to_spoil: Collection[int] = ()
    num_spoiled = 0

    def _write(self, item: WorkItem) -> None:
        super()._write(item)
        if any(member.sequence_id in self.to_spoil for member in item.members):
            self.num_spoiled += 1
            for table in item.sequence.block_tables:
                self._cache.write(table, item.start, [_NAN])

    def _choose(self, items: list[WorkItem]) -> tuple[list[SampledToken], list[Candidates], list[SequenceFailure]]:
        sampled, candidates, failed = super()._choose([item for item in items if not self._sees_nan(item)])
        broken = [member for item in items if self._sees_nan(item) for member in item.members]
        return sampled, candidates, [*failed, *(not_finite(member.sequence_id) for member in broken)]

    def _prompt_logprobs(self, item: WorkItem) -> list[PromptLogprobs]:
        return [] if self._sees_nan(item) else super()._prompt_logprobs(item)

    def _sees_nan(self, item: WorkItem) -> bool:
        if not self.num_spoiled:
            return False
        end = item.start + item.num_tokens
        # Group by group: what one does not see, another may.
        return any(
            _NAN
            in array("i", self._cache.read(table, max(0, item.start - group.window + 1) if group.window else 0, end))
            for group, table in zip(self.kv_groups, item.sequence.block_tables, strict=True)
        )
