"""The choices of a step's sequences from its logits: tokens, with their logprobs where wanted, or candidates of beams.

A row's choice depends on its own logits, parameters, tokens and key alone, never on the rows beside it. Logprobs are
those of the untouched logits; then come the processors (`octavo.worker.sampling.logits_processors` gives their order)
and the draw (`octavo.worker.sampling.draw`).

A beam search chooses from the most likely next tokens of each beam. As in transformers' beam search, the processors
change log-probabilities, not logits, and the result is not normalised again. There is no temperature.
"""

from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import Candidates, FurtherTokens, SampledToken, SequenceFailure
from octavo.worker.sampling.acceptance import accepted, reports
from octavo.worker.sampling.draw import Rows, draw
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.logprobs import listed, log_norms, row_logprobs
from octavo.worker.sampling.row_reductions import largest
from octavo.worker.sequences import Chooser, WorkerSequence
from octavo.worker.step.failures import no_token_left, not_finite


def beam_candidates(logits: Tensor, beams: list[Chooser], masks: Masks = NO_MASKS) -> list[Candidates]:
    """Returns the candidates of each of `beams` from its row of `logits` ([rows, vocab_size] fp32, the model's own).

    `masks` holds the masks of beams with grammars. There are so many candidates that each beam can go on even if every
    token that could end a hypothesis is among them. They are tokens that no processor excludes, in falling order, equal
    ones by rising id. Raises `NotFiniteError`.
    """
    top, norm = log_norms(logits)
    counts = [num_candidates(beam) for beam in beams]
    logprobs = logits - top - norm
    if any(is_processed(beam) for beam in beams):
        process(logprobs, beams, masks)
    values, tokens = largest(logprobs, max(counts))
    rows = zip(beams, listed(tokens, values, counts), strict=True)
    return [Candidates(beam.sequence_id, token_ids, values) for beam, (token_ids, values) in rows]


def num_candidates(beam: Chooser) -> int:
    """Returns how many candidates are wanted of one beam."""
    assert beam.sampling.beam
    return max(2, 1 + len(beam.sampling.stop_token_ids)) * beam.sampling.beam.width


@dataclass(frozen=True)
class Choices:
    """Holds the tokens of sequences that sample, the candidates of beams, the failures of those that can do neither,
    and the `further` tokens that drafts have brought, each in the order of the rows."""

    sampled: list[SampledToken]
    candidates: list[Candidates]
    failed: list[SequenceFailure]
    further: list[FurtherTokens] = field(default_factory=list)


def choose(logits: Tensor, choosers: list[Chooser], masks: Masks = NO_MASKS) -> Choices:
    """Chooses for each of `choosers` from its row of `logits` ([rows, vocab_size], any float dtype; left as they are).

    `masks` holds the masks of choosers with grammars. A chooser fails if its row has a NaN, a positive infinity, or
    nothing finite, or if it excludes everything finite; one with drafted tokens then just does not count.
    """
    if not choosers:
        return Choices([], [], [])
    rows = Rows.of(logits.float(), choosers)
    finite = [isfinite(value) for value in rows.largest.tolist()]
    samplers = [row for row, each in enumerate(choosers) if finite[row] and not each.sampling.beam]
    beams = [row for row, each in enumerate(choosers) if finite[row] and each.sampling.beam]
    sampled, further = _sample(rows, samplers, masks) if samplers else ([], [])
    candidates = _candidates(rows.only(beams), masks) if beams else []
    answered = {each.sequence_id for each in sampled} | {each.sequence_id for each in candidates}
    return Choices(sampled, candidates, failures(choosers, finite, answered, masks), further)


def guesses(logits: Tensor, choosers: list[Chooser], masks: Masks = NO_MASKS) -> list[int | None]:
    """Returns what each of `choosers` would choose from its row of a draft model's `logits` ([rows, vocab_size]), drawn
    with the number with which it will choose from the model's own: so two models that agree draw the same. None where
    it could choose nothing."""
    rows = Rows.of(logits.float(), choosers)
    samplers = [row for row, value in enumerate(rows.largest.tolist()) if isfinite(value)]
    if not samplers:
        return [None] * len(choosers)
    token_ids, possible = _drawn(rows, samplers, masks)
    return [token_id if row in possible else None for row, token_id in enumerate(token_ids)]


def broken(hidden: Tensor, sequences: list[WorkerSequence]) -> list[SequenceFailure]:
    """Returns the failures of those `sequences` whose row of `hidden` ([rows, hidden_size]) is not finite."""
    if not sequences:
        return []
    finite = torch.isfinite(hidden).all(dim=-1).tolist()
    return [not_finite(each.sequence_id) for each, good in zip(sequences, finite, strict=True) if not good]


def failures(choosers: list[Chooser], finite: list[bool], answered: set[int], masks: Masks) -> list[SequenceFailure]:
    """Returns the failures of the sequences that are not `answered`; `finite` tells which choosers have finite
    logits."""
    return [
        _failure(chooser, masks) if good else not_finite(chooser.sequence_id)
        for chooser, good in zip(choosers, finite, strict=True)
        if not chooser.num_drafted and chooser.sequence_id not in answered
    ]


def _failure(chooser: Chooser, masks: Masks) -> SequenceFailure:
    exhausted = no_token_left(chooser.sequence_id, constrained=bool(chooser.sampling.grammar))
    return masks.failed.get(chooser.sequence_id, exhausted)


def _sample(rows: Rows, samplers: list[int], masks: Masks) -> tuple[list[SampledToken], list[FurtherTokens]]:
    """Samples a token for each of `samplers` for whom the processors leave one, and keeps those that count."""
    token_ids, possible = _drawn(rows, samplers, masks)
    counting = accepted(rows.choosers, token_ids, possible)
    return reports(rows.choosers, counting, token_ids, _logprobs(rows, counting, token_ids))


def _drawn(rows: Rows, samplers: list[int], masks: Masks) -> tuple[list[int], set[int]]:
    """Draws a token for each row; returns them with those of `samplers` for whom the processors leave one: the tokens
    of all others are void."""
    processed = [row for row in samplers if is_processed(rows.choosers[row])]
    chosen = draw(rows, sorted(set(samplers) - set(processed)))
    exhausted: set[int] = set()
    if processed:
        changed = _processed(rows, processed, masks)
        possible = torch.isfinite(changed.largest).tolist()
        exhausted = {row for row, good in zip(processed, possible, strict=True) if not good}
        tokens = draw(changed, [index for index, good in enumerate(possible) if good])
        chosen[torch.tensor(processed, device=chosen.device)] = tokens
    token_ids: list[int] = chosen.tolist()
    return token_ids, set(samplers) - exhausted


def _candidates(beams: Rows, masks: Masks) -> list[Candidates]:
    """Returns the candidates of the beams for whom the processors leave a token."""
    return [found for found in beam_candidates(beams.logits, beams.choosers, masks) if found.token_ids]


def _processed(rows: Rows, wanted: list[int], masks: Masks) -> Rows:
    """Returns copies of the rows `wanted`, changed by the processors."""
    index = torch.tensor(wanted, device=rows.logits.device)
    logits, choosers = rows.logits.index_select(0, index), [rows.choosers[row] for row in wanted]
    process(logits, choosers, masks)
    return Rows.of(logits, choosers)


def _logprobs(rows: Rows, samplers: list[int], token_ids: list[int]) -> dict[int, Logprobs]:
    """Returns the logprobs of those `samplers` that want them, by row."""
    tops = {row: top for row in samplers if (top := rows.choosers[row].sampling.logprobs) is not None}
    if not tops:
        return {}
    logits = rows.only(list(tops)).logits
    found = row_logprobs(logits, [token_ids[row] for row in tops], list(tops.values()))
    return dict(zip(tops, found, strict=True))
