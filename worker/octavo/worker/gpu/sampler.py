"""`octavo.worker.sampling.sampler` for a device that must not be waited for: choosing is launched, what is chosen
stays on the device for the next step, and the choices are told once they have been copied back.

As there, a row's choice depends on its own logits, parameters, tokens and key alone. The draw is
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
from octavo.wire.sampling import BeamSearch, EarlyStopping, Logprobs, SamplingParams
from octavo.wire.steps import Candidates, SampledToken, SequenceFailure
from octavo.worker.gpu.beams import DeviceCandidates, launch_candidates
from octavo.worker.gpu.logprobs import DeviceLogprobs, launch_logprobs
from octavo.worker.gpu.transfer import download, upload
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.rng import uniforms
from octavo.worker.sampling.sampler import Choices, failures
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.failures import not_finite

Parameters = npt.NDArray[np.float64]

# Of a row that samples in another way, or not at all.
_GREEDY = (0.0, 0.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class DeviceChoices:
    """What `choosers` choose, one row each. On the device: `tokens`, [rows] int64; of a row that samples none, any id.

    On the CPU, once the step is read back: the `token_ids`, the `largest` logit of each row, and what is the largest of
    those that its processors have `left`, [rows] each; the `logprobs` of the rows `wanting` them; the beams'
    `candidates`. `masks` are those of choosers with grammars.
    """

    tokens: Tensor
    choosers: list[WorkerSequence]
    token_ids: Tensor
    largest: Tensor
    left: Tensor
    wanting: list[int]
    logprobs: DeviceLogprobs | None
    candidates: DeviceCandidates | None
    masks: Masks

    def choices(self) -> Choices:
        """What `octavo.worker.sampling.sampler.choose` answers. To be called once the step is read back."""
        finite = [isfinite(value) for value in self.largest.tolist()]
        sampled, candidates = self._sampled(finite), self._candidates(finite)
        answered = {each.sequence_id for each in sampled} | {each.sequence_id for each in candidates}
        return Choices(sampled, candidates, failures(self.choosers, finite, answered, self.masks))

    def _sampled(self, finite: list[bool]) -> list[SampledToken]:
        logprobs: dict[int, Logprobs] = {}
        if self.logprobs:
            logprobs = dict(zip(self.wanting, self.logprobs.listed(), strict=True))
        rows = zip(self.choosers, finite, self.token_ids.tolist(), self.left.tolist(), strict=True)
        return [
            SampledToken(chooser.sequence_id, token_id, logprobs.get(row))
            for row, (chooser, good, token_id, left) in enumerate(rows)
            if good and isfinite(left) and not chooser.sampling.beam
        ]

    def _candidates(self, finite: list[bool]) -> list[Candidates]:
        if self.candidates is None:
            return []
        good = [each for chooser, each in zip(self.choosers, finite, strict=True) if chooser.sampling.beam]
        return [found for found, each in zip(self.candidates.listed(), good, strict=True) if each and found.token_ids]


@dataclass(frozen=True)
class DeviceBroken:
    """Whether the row of each of `sequences` is `finite`, [rows] bool on the CPU once the step is read back."""

    sequences: list[WorkerSequence]
    finite: Tensor

    def failures(self) -> list[SequenceFailure]:
        """What `octavo.worker.sampling.sampler.broken` answers. To be called once the step is read back."""
        rows = zip(self.sequences, self.finite.tolist(), strict=True)
        return [not_finite(each.sequence_id) for each, good in rows if not good]


def launch(logits: Tensor, choosers: list[WorkerSequence], masks: Masks = NO_MASKS) -> DeviceChoices:
    """Starts what `octavo.worker.sampling.sampler.choose` does with `logits` ([rows, vocab_size], any float dtype, the
    ids of a row side by side; left as they are) and waits for nothing.

    Of a sequence with penalties or a grammar all tokens must be known. Raises `ValueError`.
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
        again = draw(_processed(logits, index, [choosers[row] for row in processed], masks), changed)
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
    """Has compiled what `launch` needs for such logits ([rows, vocab_size], at least one row), for none of which a
    request should have to wait."""
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 1},
        {"banned_token_ids": [0]},
        {"beam": BeamSearch(1, 1.0, EarlyStopping.ON)},
    ]
    sequences = [
        WorkerSequence(row, 0, SamplingParams(max_tokens=1, **each), 1, [0], 1, []) for row, each in enumerate(asked)
    ]
    launch(logits[:1].repeat(len(sequences), 1), sequences)


def _parameters(sequences: list[WorkerSequence]) -> Parameters:
    """[sequences, 5], as `octavo.kernels.triton.sampling.draw` wants them."""
    params = [sequence.sampling for sequence in sequences]
    rows = [(0.0, each.temperature, each.top_k, each.top_p, each.min_p) for each in params]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(_GREEDY))
    if table[:, TEMPERATURE].any():
        table[:, UNIFORM] = uniforms(
            [each.seed for each in params],
            [sequence.sequence_index for sequence in sequences],
            [sequence.num_generated for sequence in sequences],
        )
    return table


def _processed(logits: Tensor, index: Tensor, sequences: list[WorkerSequence], masks: Masks) -> Tensor:
    """Copies of the rows `index` ([rows] int64) that the processors have changed."""
    copies = logits.index_select(0, index).float()
    process(copies, sequences, masks)
    return copies


def _logprobs(
    logits: Tensor, tokens: Tensor, choosers: list[WorkerSequence], wanting: list[int]
) -> DeviceLogprobs | None:
    tops = [choosers[row].sampling.logprobs or 0 for row in wanting]
    if not tops:
        return None
    index = _index(wanting, logits)
    return launch_logprobs(logits.index_select(0, index), tokens.index_select(0, index), tops)


def _candidates(
    logits: Tensor, choosers: list[WorkerSequence], beams: list[int], masks: Masks
) -> DeviceCandidates | None:
    if not beams:
        return None
    rows = logits.index_select(0, _index(beams, logits))
    return launch_candidates(rows, [choosers[row] for row in beams], masks)


def _index(rows: list[int], logits: Tensor) -> Tensor:
    return upload(np.array(rows, dtype=np.int64), logits.device)
