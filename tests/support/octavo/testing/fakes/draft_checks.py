"""Checks drafts as a worker does, by decoding on one token at a time while guesses turn out right."""

from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.wire.steps import BlockMoves, FurtherTokens, StepPlan
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import WorkerSequence, WorkItem

# What a guess leaves in its slot that was wrong, or that nobody looked at.
_GARBAGE = 7


def check_drafts(runner: Runner, table: SequenceTable, plan: StepPlan, output: StepOutput) -> list[FurtherTokens]:
    """Goes on after a step, and returns the tokens that its drafts brought. Every slot of a draft is written to; the
    blocks that are not needed any more leave the tables."""
    sequences = {sequence.sequence_id: sequence for sequence in table}
    first = {sampled.sequence_id: sampled.token_id for sampled in output.sampled}
    found = []
    for draft in plan.drafts:
        if draft.sequence_id in first:
            sequence = sequences[draft.sequence_id]
            end = sequence.num_computed + len(draft.token_ids)
            further = FurtherTokens(draft.sequence_id, [], [])
            chosen = first[draft.sequence_id]
            for guess in draft.token_ids:
                if guess != chosen:
                    break
                item = WorkItem(sequence, sequence.num_computed, 1, (sequence,))
                result = runner.execute(BlockMoves(), [item])
                if result.failed:
                    break
                table.begin([item])
                table.complete([item], result)
                (sampled,) = result.sampled
                chosen = sampled.token_id
                further.token_ids.append(chosen)
                further.logprobs.extend([] if sampled.logprobs is None else [sampled.logprobs])
            _write_garbage(runner, sequence, sequence.num_computed, end)
            _drop_unused(sequence, runner.block_size)
            found += [further] if further.token_ids else []
    return found


def _write_garbage(runner: Runner, sequence: WorkerSequence, start: int, end: int) -> None:
    assert isinstance(runner, SpoilableRunner)
    for table in sequence.block_tables:
        runner._cache.write(table, start, [_GARBAGE] * (end - start))
        runner._cache.origins.write(table, start, [0] * (end - start))


def _drop_unused(sequence: WorkerSequence, block_size: int) -> None:
    for table in sequence.block_tables:
        del table[-(-sequence.num_computed // block_size) :]
