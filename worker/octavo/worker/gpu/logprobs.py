"""Logprobs, ranks and the most likely tokens on the device: launched now, listed once they have been copied back."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton.sampling.stats import log_masses
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import PromptLogprobs, SequenceFailure
from octavo.worker.gpu.transfer import download, mark, upload
from octavo.worker.sampling.logprobs import PROMPT_ROWS, LogitsOf, NotFiniteError, listed
from octavo.worker.sampling.row_reductions import ranked
from octavo.worker.step.batch import PromptSpan
from octavo.worker.step.failures import not_finite

# Rows done at a time: ranking takes several copies of them.
_ROWS = 64


@dataclass(frozen=True)
class DeviceLogprobs:
    """Holds the logprobs of some rows, on the CPU once the step is read back.

    `largest` is each row's largest logit; `logprobs` and `ranks` are those of its token ([rows] each); `top_token_ids`
    and `top_logprobs` ([rows, n] each) are the most likely tokens, of which each row wants `tops`.
    """

    tops: list[int]
    largest: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

    def listed(self) -> list[Logprobs]:
        """Returns the logprobs of every row; the entry of a row that is not finite is void."""
        top_tokens = listed(self.top_token_ids, self.top_logprobs, self.tops)
        rows = zip(self.logprobs.tolist(), self.ranks.tolist(), top_tokens, strict=True)
        return [Logprobs(logprob, rank, ids, values) for logprob, rank, (ids, values) in rows]


def launch_logprobs(logits: Tensor, token_ids: Tensor, tops: list[int]) -> DeviceLogprobs:
    """Starts `octavo.worker.sampling.logprobs.row_logprobs` of `logits` and `token_ids` and waits for nothing.

    `logits` is [rows, vocab_size] of any float dtype, with at least one row; `token_ids` is [rows] int64 on the device.
    The numbers of a row do not depend on the rows beside it.
    """
    rows = zip(torch.split(logits, _ROWS), torch.split(token_ids, _ROWS), strict=True)
    parts = [_launched(some.float(), ids[:, None], max(1, *tops)) for some, ids in rows]
    return DeviceLogprobs(tops, *(download(torch.cat(column)) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class DevicePromptLogprobs:
    """Holds the logprobs of the tokens of a prompt from `start` on, in `parts` one after the other."""

    sequence_id: int
    start: int
    parts: list[DeviceLogprobs]

    @property
    def is_finite(self) -> bool:
        """Tells whether all logits were finite. Call it once the step is read back."""
        return all(bool(torch.isfinite(part.largest).all()) for part in self.parts)

    @property
    def failure(self) -> SequenceFailure:
        """Returns the failure of a sequence whose logits were not."""
        return not_finite(self.sequence_id)

    def listed(self) -> PromptLogprobs:
        return PromptLogprobs(self.sequence_id, self.start, [each for part in self.parts for each in part.listed()])


def launch_prompt_logprobs(spans: list[PromptSpan], logits_of: LogitsOf) -> list[DevicePromptLogprobs]:
    """Starts what `octavo.worker.sampling.logprobs.prompt_logprobs` does with the logits of a device, and waits for
    nothing."""
    first_rows = accumulate((span.length for span in spans), initial=0)
    return [_of_prompt(span, first_row, logits_of) for span, first_row in zip(spans, first_rows, strict=False)]


def _of_prompt(span: PromptSpan, first_row: int, logits_of: LogitsOf) -> DevicePromptLogprobs:
    parts = []
    for first in range(0, span.length, PROMPT_ROWS):
        last = min(first + PROMPT_ROWS, span.length)
        logits = logits_of(first_row + first, first_row + last)
        token_ids = span.sequence.token_ids[span.start + first : span.start + last]
        ids = upload(np.array(token_ids, dtype=np.int64), logits.device)
        parts.append(launch_logprobs(logits, ids, [span.sequence.sampling.prompt_logprobs or 0] * len(token_ids)))
    return DevicePromptLogprobs(span.sequence.sequence_id, span.start, parts)


def device_token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    """Returns `octavo.worker.sampling.logprobs.token_logprobs` by the same arithmetic, and waits. Raises
    `NotFiniteError`."""
    ids = torch.tensor(token_ids, device=logits.device)
    found = launch_logprobs(logits, ids, [top] * len(token_ids))
    mark(logits.device).wait()
    if not torch.isfinite(found.largest).all():
        raise NotFiniteError("no logprobs: the model gave logits that are not finite")
    return found.listed()


def _launched(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, ...]:
    largest, norm = log_masses(logits)
    chosen = logits.gather(1, token_ids)
    values, tokens = ranked(logits, count)
    top, rest = largest[:, None], norm[:, None]
    ranks = (logits > chosen).sum(dim=-1) + 1
    return largest, (chosen - top - rest).squeeze(1), ranks, tokens, values - top - rest
