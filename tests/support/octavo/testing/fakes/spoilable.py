"""A fake model whose cache remembers of what each slot was computed, and in which NaNs can be planted. A grammar is for
it the microseconds that it takes.

What a real model keeps of a token depends on all tokens before it, as far as it saw them. So whoever reads a slot that
was computed over another history than its own gets other tokens, even if the slot holds the right token by then. Every
query that sees a NaN fails.
"""

import zlib
from array import array
from collections.abc import Collection, Iterable
from typing import Any

from msgspec import structs

from octavo.testing.fakes.origins import TracedCache
from octavo.wire.steps import PromptLogprobs
from octavo.worker.fake.runner import FakeChoices, FakeRunner
from octavo.worker.kv_store.loan import Parts
from octavo.worker.sequences import Chooser, WorkItem
from octavo.worker.step.failures import not_finite


def microseconds(grammar: str) -> int:
    """Returns the microseconds that a grammar names as its time for a token."""
    return int(grammar) if grammar.isdecimal() else 0


# Stands for the keys and values of a token that are not finite, and for a history that is not the reader's own.
_NAN = -3
_FOREIGN = array("i", [-5])


class SpoilableRunner(FakeRunner):
    """Makes NaN of the first values that the next step computes for the sequences named in `to_spoil`. Sequences in
    `to_fail` keep sound keys and values, and get an output that is not."""

    to_spoil: Collection[int] = ()
    to_fail: Collection[int] = ()
    num_spoiled = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cache: TracedCache = TracedCache(
            num_blocks=self.num_blocks, num_cpu_blocks=self.num_cpu_blocks, block_size=self.block_size
        )
        # By sequence: of its tokens up to each position, one number.
        # By sequence: its tokens, and what each makes of those before.
        self._histories: dict[int, tuple[list[int], array[int]]] = {}

    def _is_sound(self, parts: Parts) -> bool:
        """Tells blocks apart with NaN, which are of no use, as with a real model."""
        return not self.num_spoiled or all(_NAN not in part.cast("i") for part in parts)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        super().forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._histories.pop(sequence_id, None)

    def _write(self, item: WorkItem) -> None:
        super()._write(item)
        # Those of a step are in an order in which whoever shares what another computes comes after it.
        own = self._history(item, item.end)[item.start :].tolist()
        origins = [0] * len(own) if self._reads_foreign(item, item.start, item.start) else own
        for table in item.sequence.block_tables:
            self._cache.origins.write(table, item.start, origins)
        if any(member.sequence_id in self.to_spoil for member in item.members):
            self.num_spoiled += 1
            for table in item.sequence.block_tables:
                self._cache.write(table, item.start, [_NAN])

    def _read(self, item: WorkItem, start: int, end: int) -> bytes:
        if self._reads_foreign(item, start, end):
            return (_FOREIGN * (end - start)).tobytes()
        return super()._read(item, start, end)

    def _reads_foreign(self, item: WorkItem, start: int, end: int) -> bool:
        """Tells whether queries from `start` on see any slot before `end` that was computed over another history."""
        own = self._history(item, end)
        for group, table in zip(self.kv_groups, item.sequence.block_tables, strict=True):
            first = max(0, start - group.window + 1) if group.window else 0
            if first < end and self._cache.origins.read(table, first, end) != own[first:end].tobytes():
                return True
        return False

    def _history(self, item: WorkItem, end: int) -> "array[int]":
        tokens, known = self._histories.get(item.sequence.sequence_id, ([], array("i")))
        own = item.sequence.token_ids
        if item.draft:
            own = own[: item.known_end] + item.draft
        if tokens != own[: len(tokens)]:
            # A name that another sequence has now, a token that was not known yet, or one that was only drafted.
            tokens, known = [], array("i")
        value = known[-1] if known else 0
        for token_id in own[len(tokens) : end]:
            # Never 0, which is nobody's; and an int32, like a token.
            value = 1 | zlib.crc32(b"%d" % token_id, value) >> 1
            tokens.append(token_id)
            known.append(value)
        self._histories[item.sequence.sequence_id] = tokens, known
        return known[:end]

    def _choose(self, items: list[WorkItem]) -> FakeChoices:
        chosen = super()._choose([item for item in items if not self._is_broken(item)])
        broken = [member for item in items if self._is_broken(item) for member in item.members]
        times = {each.sequence_id: microseconds(each.sampling.grammar) for item in items for each in item.choosers}
        chosen.failed += [not_finite(member.sequence_id) for member in broken]
        chosen.grammars = [structs.replace(each, microseconds=times[each.sequence_id]) for each in chosen.grammars]
        return chosen

    def _mask(self, chooser: Chooser) -> bytes | None:
        return None

    def _prompt_logprobs(self, item: WorkItem) -> list[PromptLogprobs]:
        return [] if self._is_broken(item) else super()._prompt_logprobs(item)

    def _is_broken(self, item: WorkItem) -> bool:
        return any(member.sequence_id in self.to_fail for member in item.members) or self._sees_nan(item)

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
