"""Logprobs, ranks and the likeliest tokens on the device: launched now, listed once they have been copied back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.triton.sampling.stats import log_masses
from octavo.wire.sampling import Logprobs
from octavo.worker.gpu.timeline import mark
from octavo.worker.gpu.transfer import download
from octavo.worker.sampling.largest import ranked
from octavo.worker.sampling.logprobs import NotFiniteError, listed

# Rows done at a time: ranking takes several copies of them.
_ROWS = 64


@dataclass(frozen=True)
class DeviceLogprobs:
    """On the CPU once the step is read back. Of each row the `largest` logit, and its token's `logprobs` and `ranks`,
    [rows] each; of the likeliest tokens `top_token_ids` and `top_logprobs`, [rows, n] each, of which `tops` are wanted.
    """

    tops: list[int]
    largest: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

    def listed(self) -> list[Logprobs]:
        """Of every row; what is said of one that is not finite is void."""
        likeliest = listed(self.top_token_ids, self.top_logprobs, self.tops)
        rows = zip(self.logprobs.tolist(), self.ranks.tolist(), likeliest, strict=True)
        return [Logprobs(logprob, rank, ids, values) for logprob, rank, (ids, values) in rows]


def launch_logprobs(logits: Tensor, token_ids: Tensor, tops: list[int]) -> DeviceLogprobs:
    """`octavo.worker.sampling.logprobs.row_logprobs` of `logits` ([rows, vocab_size] of any float dtype, one row at
    least) and `token_ids` ([rows] int64 on the device), whose numbers do not depend on the rows beside a row."""
    rows = zip(torch.split(logits, _ROWS), torch.split(token_ids, _ROWS), strict=True)
    parts = [_launched(some.float(), ids[:, None], max(1, *tops)) for some, ids in rows]
    return DeviceLogprobs(tops, *(download(torch.cat(column)) for column in zip(*parts, strict=True)))


def device_token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    """`octavo.worker.sampling.logprobs.token_logprobs` by the same arithmetic; it waits. Raises `NotFiniteError`."""
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
