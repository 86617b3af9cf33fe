"""`octavo.worker.sampling.sampler` for a device that the host must not wait for.

Choosing is launched, the chosen tokens stay on the device for the next step, and the choices are read once they have
been copied back. A row's choice depends on its own logits, parameters, tokens and key alone. The draw is
`octavo.kernels.triton.sampling.draw`.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.triton.sampling.draw import TEMPERATURE, UNIFORM, draw
from octavo.kernels.triton.sampling.stats import log_masses
from octavo.wire.sampling import BeamSearch, EarlyStopping, Logprobs, SamplingParams
from octavo.wire.steps import Candidates, FurtherTokens, SampledToken, SequenceFailure
from octavo.worker.gpu.logprobs import DeviceLogprobs, launch_logprobs
from octavo.worker.gpu.transfer import download, upload
from octavo.worker.sampling.acceptance import accepted, reports
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.logprobs import listed
from octavo.worker.sampling.rng import uniforms
from octavo.worker.sampling.row_reductions import ranked
from octavo.worker.sampling.sampler import Choices, failures, num_candidates
from octavo.worker.sequences import Chooser, WorkerSequence
from octavo.worker.step.failures import not_finite


@dataclass(frozen=True)
class DeviceCandidates:
    """Holds the candidates of beams, on the CPU once the step is read back.

    `token_ids` and `logprobs` ([beams, n] each) belong to the `beams`, each of which wants `counts`.
    """

    beams: list[Chooser]
    token_ids: Tensor
    logprobs: Tensor
    counts: list[int]

    def listed(self) -> list[Candidates]:
        """Returns the candidates of every beam; the entry of a beam whose logits are not finite is void."""
        rows = zip(self.beams, listed(self.token_ids, self.logprobs, self.counts), strict=True)
        return [Candidates(beam.sequence_id, token_ids, values) for beam, (token_ids, values) in rows]


def launch_candidates(logits: Tensor, beams: list[Chooser], masks: Masks = NO_MASKS) -> DeviceCandidates:
    """Starts `octavo.worker.sampling.sampler.beam_candidates` of `logits` and waits for nothing.

    `logits` is [beams, vocab_size] of any float dtype, with at least one row. The numbers of a row do not depend on the
    rows beside it.
    """
    counts = [num_candidates(beam) for beam in beams]
    largest, norm = log_masses(logits)
    logprobs = logits.float() - largest[:, None] - norm[:, None]
    if any(is_processed(beam) for beam in beams):
        process(logprobs, beams, masks)
    values, token_ids = ranked(logprobs, max(counts))
    return DeviceCandidates(beams, download(token_ids), download(values), counts)


Parameters = npt.NDArray[np.float64]

# The parameters of a row that samples in another way, or not at all.
_GREEDY = (0.0, 0.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class DeviceChoices:
    """Holds the choices of `choosers`, one row each.

    On the device: `tokens`, [rows] int64, with any id for a row that samples none. On the CPU, once the step is read
    back: the `token_ids`, the `largest` logit of each row, and the largest logit that its processors have `left`
    ([rows] each); the `logprobs` of the rows `wanting` them; the beams' `candidates`. `masks` holds the masks of
    choosers with grammars.
    """

    tokens: Tensor
    choosers: list[Chooser]
    token_ids: Tensor
    largest: Tensor
    left: Tensor
    wanting: list[int]
    logprobs: DeviceLogprobs | None
    candidates: DeviceCandidates | None
    masks: Masks

    def choices(self) -> Choices:
        """Returns what `octavo.worker.sampling.sampler.choose` does. Call it once the step is read back."""
        finite = [isfinite(value) for value in self.largest.tolist()]
        (sampled, further), candidates = self._sampled(finite), self._candidates(finite)
        answered = {each.sequence_id for each in sampled} | {each.sequence_id for each in candidates}
        return Choices(sampled, candidates, failures(self.choosers, finite, answered, self.masks), further)

    def _sampled(self, finite: list[bool]) -> tuple[list[SampledToken], list[FurtherTokens]]:
        logprobs: dict[int, Logprobs] = {}
        if self.logprobs:
            logprobs = dict(zip(self.wanting, self.logprobs.listed(), strict=True))
        token_ids: list[int] = self.token_ids.tolist()
        rows = zip(self.choosers, finite, self.left.tolist(), strict=True)
        possible = {
            row
            for row, (chooser, good, left) in enumerate(rows)
            if good and isfinite(left) and not chooser.sampling.beam
        }
        return reports(self.choosers, accepted(self.choosers, token_ids, possible), token_ids, logprobs)

    def _candidates(self, finite: list[bool]) -> list[Candidates]:
        if self.candidates is None:
            return []
        good = [each for chooser, each in zip(self.choosers, finite, strict=True) if chooser.sampling.beam]
        return [found for found, each in zip(self.candidates.listed(), good, strict=True) if each and found.token_ids]


@dataclass(frozen=True)
class DeviceBroken:
    """Holds whether the row of each of `sequences` is `finite`, [rows] bool, on the CPU once the step is read back."""

    sequences: list[WorkerSequence]
    finite: Tensor

    def failures(self) -> list[SequenceFailure]:
        """Returns what `octavo.worker.sampling.sampler.broken` does. Call it once the step is read back."""
        rows = zip(self.sequences, self.finite.tolist(), strict=True)
        return [not_finite(each.sequence_id) for each, good in rows if not good]


def launch(
    logits: Tensor, choosers: list[Chooser], masks: Masks = NO_MASKS, last_tokens: Tensor | None = None
) -> DeviceChoices:
    """Starts what `octavo.worker.sampling.sampler.choose` does with `logits` and waits for nothing.

    `logits` is [rows, vocab_size] of any float dtype, the ids of a row side by side; it is left as it is. All tokens of
    a sequence with a grammar must be known; the pending one of a sequence with penalties stands in `last_tokens`
    ([rows] int64, on the device). Raises `ValueError` if rows and choosers differ in number.
    """
    if len(logits) != len(choosers):
        raise ValueError(f"{len(logits)} rows of logits for {len(choosers)} sequences that choose from them")
    beams = [row for row, each in enumerate(choosers) if each.sampling.beam]
    processed = [row for row, each in enumerate(choosers) if not each.sampling.beam and is_processed(each)]
    wanting = [
        row for row, each in enumerate(choosers) if not each.sampling.beam and each.sampling.logprobs is not None
    ]
    table = _parameters([*choosers, *(choosers[row] for row in processed)])
    table[beams + processed] = _GREEDY
    plain, changed = torch.split(upload(table, logits.device), [len(choosers), len(processed)])
    drawn = draw(logits, plain)
    tokens, largest = drawn.tokens, download(drawn.largest)
    left = largest
    if processed:
        index = _index(processed, logits)
        last = None if last_tokens is None else last_tokens.index_select(0, index)
        again = draw(_processed(logits, index, [choosers[row] for row in processed], masks, last), changed)
        left = download(drawn.largest.index_copy(0, index, again.largest))
        tokens.index_copy_(0, index, again.tokens)
    return DeviceChoices(
        tokens,
        choosers,
        download(tokens),
        largest,
        left,
        wanting,
        _logprobs(logits, tokens, choosers, wanting),
        _candidates(logits, choosers, beams, masks),
        masks,
    )


def launch_broken(hidden: Tensor, sequences: list[WorkerSequence]) -> DeviceBroken:
    """Starts what `octavo.worker.sampling.sampler.broken` does with `hidden` ([rows, hidden_size]) and waits for
    nothing."""
    return DeviceBroken(sequences, download(torch.isfinite(hidden).all(dim=-1)))


def warm_up(logits: Tensor) -> None:
    """Compiles the kernels that `launch` needs for such logits ([rows, vocab_size], at least one row)."""
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 1},
        {"banned_token_ids": [0]},
        {"beam": BeamSearch(1, 1.0, EarlyStopping.ON)},
    ]
    choosers = [
        Chooser(WorkerSequence(row, 0, SamplingParams(max_tokens=1, **each), 1, [0], 1, []))
        for row, each in enumerate(asked)
    ]
    launch(logits[:1].repeat(len(choosers), 1), choosers)


def _parameters(choosers: list[Chooser]) -> Parameters:
    """Returns [choosers, 5], the parameters as `octavo.kernels.triton.sampling.draw` takes them."""
    params = [chooser.sampling for chooser in choosers]
    rows = [(0.0, each.temperature, each.top_k, each.top_p, each.min_p) for each in params]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(_GREEDY))
    if table[:, TEMPERATURE].any():
        table[:, UNIFORM] = uniforms(
            [each.seed for each in params],
            [chooser.sequence.sequence_index for chooser in choosers],
            [chooser.num_generated for chooser in choosers],
        )
    return table


def _processed(
    logits: Tensor, index: Tensor, choosers: list[Chooser], masks: Masks, last_tokens: Tensor | None
) -> Tensor:
    """Returns copies of the rows `index` ([rows] int64), changed by the processors."""
    copies = logits.index_select(0, index).float()
    process(copies, choosers, masks, last_tokens)
    return copies


def _logprobs(logits: Tensor, tokens: Tensor, choosers: list[Chooser], wanting: list[int]) -> DeviceLogprobs | None:
    tops = [choosers[row].sampling.logprobs or 0 for row in wanting]
    if not tops:
        return None
    index = _index(wanting, logits)
    return launch_logprobs(logits.index_select(0, index), tokens.index_select(0, index), tops)


def _candidates(logits: Tensor, choosers: list[Chooser], beams: list[int], masks: Masks) -> DeviceCandidates | None:
    if not beams:
        return None
    rows = logits.index_select(0, _index(beams, logits))
    return launch_candidates(rows, [choosers[row] for row in beams], masks)


def _index(rows: list[int], logits: Tensor) -> Tensor:
    return upload(np.array(rows, dtype=np.int64), logits.device)
