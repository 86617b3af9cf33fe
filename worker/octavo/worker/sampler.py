"""From a step's logits to what its sequences choose: tokens, with their logprobs where wanted, or beams' candidates.

A row's choice depends on its own logits, parameters, tokens and key alone, never on the rows beside it. Logprobs are
those of the untouched logits; then come the processors (`octavo.worker.logits_processors` gives their order) and the
draw (`octavo.worker.draw`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import Candidates, SampledToken
from octavo.worker.beam_candidates import beam_candidates
from octavo.worker.draw import Rows, draw
from octavo.worker.logits_processors import is_processed, process
from octavo.worker.logprobs import row_logprobs
from octavo.worker.sequences import WorkerSequence


class SamplingError(Exception):
    """Logits that no token can be chosen from."""


@dataclass(frozen=True)
class Choices:
    """The tokens of those that sample and the candidates of those that are beams, each in the order of the rows."""

    sampled: list[SampledToken]
    candidates: list[Candidates]


def choose(logits: Tensor, choosers: list[WorkerSequence]) -> Choices:
    """What each of `choosers` gets from its row of `logits` ([rows, vocab_size], any float dtype; left as they are).

    Raises `SamplingError` if a row has a NaN, a positive infinity, or nothing finite, or if its sequence excludes all
    that is finite.
    """
    if not choosers:
        return Choices([], [])
    rows = Rows.of(logits.float(), choosers)
    _check_finite(rows)
    beams = [row for row, sequence in enumerate(choosers) if sequence.sampling.beam]
    samplers = [row for row, sequence in enumerate(choosers) if not sequence.sampling.beam]
    return Choices(_sample(rows, samplers) if samplers else [], _candidates(rows, beams) if beams else [])


def _sample(rows: Rows, samplers: list[int]) -> list[SampledToken]:
    processed = [row for row in samplers if is_processed(rows.sequences[row])]
    chosen = draw(rows, sorted(set(samplers) - set(processed)))
    if processed:
        chosen[torch.tensor(processed, device=chosen.device)] = _draw_processed(rows, processed)
    token_ids: list[int] = chosen.tolist()
    logprobs = _logprobs(rows, samplers, token_ids)
    return [SampledToken(rows.sequences[row].sequence_id, token_ids[row], logprobs.get(row)) for row in samplers]


def _draw_processed(rows: Rows, processed: list[int]) -> Tensor:
    """[len(processed)] token ids from copies of these rows that the processors have changed."""
    logits, sequences = _select(rows, processed)
    process(logits, sequences)
    changed = Rows.of(logits, sequences)
    possible = torch.isfinite(changed.largest).tolist()
    _check_possible(sequence for sequence, good in zip(sequences, possible, strict=True) if not good)
    return draw(changed, list(range(len(processed))))


def _logprobs(rows: Rows, samplers: list[int], token_ids: list[int]) -> dict[int, Logprobs]:
    """By row, of those that want them."""
    tops = {row: top for row in samplers if (top := rows.sequences[row].sampling.logprobs) is not None}
    if not tops:
        return {}
    logits, _ = _select(rows, list(tops))
    found = row_logprobs(logits, [token_ids[row] for row in tops], list(tops.values()))
    return dict(zip(tops, found, strict=True))


def _candidates(rows: Rows, beams: list[int]) -> list[Candidates]:
    logits, sequences = _select(rows, beams)
    candidates = beam_candidates(logits, sequences)
    _check_possible(beam for beam, found in zip(sequences, candidates, strict=True) if not found.token_ids)
    return candidates


def _select(rows: Rows, wanted: list[int]) -> tuple[Tensor, list[WorkerSequence]]:
    """A copy of the logits of these rows, and their sequences."""
    return rows.logits[torch.tensor(wanted, device=rows.logits.device)], [rows.sequences[row] for row in wanted]


def _check_finite(rows: Rows) -> None:
    finite = torch.isfinite(rows.largest).tolist()
    broken = [sequence for sequence, good in zip(rows.sequences, finite, strict=True) if not good]
    if broken:
        raise SamplingError(
            f"the model gave logits that are not finite for sequences {_names(broken)};"
            " its weights are broken or overflow in this dtype (try --dtype float32)"
        )


def _check_possible(stuck: Iterable[WorkerSequence]) -> None:
    if names := _names(stuck):
        raise SamplingError(
            f"no token is left to choose for sequences {names}: allowed_token_ids, banned_token_ids and, before"
            " min_tokens, stop_token_ids exclude all that the model holds possible; allow or stop excluding some"
        )


def _names(sequences: Iterable[WorkerSequence]) -> str:
    return ", ".join([f"{sequence.sequence_id:#x}" for sequence in sequences][:8])
