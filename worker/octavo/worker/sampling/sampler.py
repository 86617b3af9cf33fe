"""From a step's logits to what its sequences choose: tokens, with their logprobs where wanted, or beams' candidates.

A row's choice depends on its own logits, parameters, tokens and key alone, never on the rows beside it. Logprobs are
those of the untouched logits; then come the processors (`octavo.worker.sampling.logits_processors` gives their order)
and the draw (`octavo.worker.sampling.draw`).
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import Candidates, SampledToken, SequenceFailure
from octavo.worker.sampling.beam_candidates import beam_candidates
from octavo.worker.sampling.draw import Rows, draw
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.logprobs import row_logprobs
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.failures import no_token_left, not_finite


@dataclass(frozen=True)
class Choices:
    """The tokens of those that sample, the candidates of those that are beams, and the failures of those that can do
    neither, each in the order of the rows."""

    sampled: list[SampledToken]
    candidates: list[Candidates]
    failed: list[SequenceFailure]


def choose(logits: Tensor, choosers: list[WorkerSequence], masks: Masks = NO_MASKS) -> Choices:
    """What each of `choosers` gets from its row of `logits` ([rows, vocab_size], any float dtype; left as they are);
    `masks` of those with grammars.

    It fails if its row has a NaN, a positive infinity, or nothing finite, or if it excludes all that is finite.
    """
    if not choosers:
        return Choices([], [], [])
    rows = Rows.of(logits.float(), choosers)
    finite = [isfinite(value) for value in rows.largest.tolist()]
    samplers = [row for row, each in enumerate(choosers) if finite[row] and not each.sampling.beam]
    beams = [row for row, each in enumerate(choosers) if finite[row] and each.sampling.beam]
    sampled = _sample(rows, samplers, masks) if samplers else []
    candidates = _candidates(rows.only(beams), masks) if beams else []
    answered = {each.sequence_id for each in sampled} | {each.sequence_id for each in candidates}
    return Choices(sampled, candidates, failures(choosers, finite, answered, masks))


def broken(hidden: Tensor, sequences: list[WorkerSequence]) -> list[SequenceFailure]:
    """Those of `sequences` whose row of `hidden` ([rows, hidden_size]) is not finite."""
    if not sequences:
        return []
    finite = torch.isfinite(hidden).all(dim=-1).tolist()
    return [not_finite(each.sequence_id) for each, good in zip(sequences, finite, strict=True) if not good]


def failures(
    choosers: list[WorkerSequence], finite: list[bool], answered: set[int], masks: Masks
) -> list[SequenceFailure]:
    """Those of the choosers, whose logits are `finite` or not, that are not answered."""
    return [
        _failure(chooser, masks) if good else not_finite(chooser.sequence_id)
        for chooser, good in zip(choosers, finite, strict=True)
        if chooser.sequence_id not in answered
    ]


def _failure(chooser: WorkerSequence, masks: Masks) -> SequenceFailure:
    stuck = no_token_left(chooser.sequence_id, constrained=bool(chooser.sampling.grammar))
    return masks.failed.get(chooser.sequence_id, stuck)


def _sample(rows: Rows, samplers: list[int], masks: Masks) -> list[SampledToken]:
    """Those of `samplers` for whom their processors leave a token."""
    processed = [row for row in samplers if is_processed(rows.sequences[row])]
    chosen = draw(rows, sorted(set(samplers) - set(processed)))
    stuck: set[int] = set()
    if processed:
        changed = _processed(rows, processed, masks)
        possible = torch.isfinite(changed.largest).tolist()
        stuck = {row for row, good in zip(processed, possible, strict=True) if not good}
        tokens = draw(changed, [index for index, good in enumerate(possible) if good])
        chosen[torch.tensor(processed, device=chosen.device)] = tokens
    token_ids: list[int] = chosen.tolist()
    lucky = [row for row in samplers if row not in stuck]
    logprobs = _logprobs(rows, lucky, token_ids)
    return [SampledToken(rows.sequences[row].sequence_id, token_ids[row], logprobs.get(row)) for row in lucky]


def _candidates(beams: Rows, masks: Masks) -> list[Candidates]:
    """Those of the beams for whom their processors leave a token."""
    return [found for found in beam_candidates(beams.logits, beams.sequences, masks) if found.token_ids]


def _processed(rows: Rows, wanted: list[int], masks: Masks) -> Rows:
    """Copies of these rows that the processors have changed."""
    index = torch.tensor(wanted, device=rows.logits.device)
    logits, sequences = rows.logits.index_select(0, index), [rows.sequences[row] for row in wanted]
    process(logits, sequences, masks)
    return Rows.of(logits, sequences)


def _logprobs(rows: Rows, samplers: list[int], token_ids: list[int]) -> dict[int, Logprobs]:
    """By row, of those that want them."""
    tops = {row: top for row in samplers if (top := rows.sequences[row].sampling.logprobs) is not None}
    if not tops:
        return {}
    logits = rows.only(list(tops)).logits
    found = row_logprobs(logits, [token_ids[row] for row in tops], list(tops.values()))
    return dict(zip(tops, found, strict=True))
