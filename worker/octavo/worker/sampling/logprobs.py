"""Log-probabilities under the model's own distribution, and the likeliest tokens with theirs."""

from math import inf

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.worker.sampling.largest import largest, likeliest
from octavo.worker.sampling.probability_sums import total_mass

# Rows done at a time: a long prompt's logits would otherwise be held in several copies.
_ROWS = 64


class NotFiniteError(ValueError):
    """A row of logits with a NaN, a positive infinity, or nothing finite."""


def token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    """The logprob and rank of each row's token, and the `top` likeliest tokens.

    `logits` are [rows, vocab_size] of any float dtype, as the model gave them; one of `token_ids` per row. The rank is
    1 plus the number of tokens that are strictly likelier. The likeliest come in falling order, equal ones by rising
    id; fewer than `top` if the vocabulary has no more with a probability above 0.

    Raises `NotFiniteError`.
    """
    return row_logprobs(logits, token_ids, [top] * len(token_ids))


def row_logprobs(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
    """`token_logprobs` with a number of likeliest tokens for each row."""
    found: list[Logprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        rows = slice(start, start + _ROWS)
        found += _some_logprobs(logits[rows].float(), token_ids[rows], tops[rows])
    return found


def log_norms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of `logits` ([rows, vocab_size] fp32), and the logarithm of the sum of all exponentials
    relative to it, [rows, 1] fp32 each; a row's are the same whatever rows are beside it. A logprob is the logit less
    both, one after the other.

    Raises `NotFiniteError`.
    """
    top, token = likeliest(logits)
    if not torch.isfinite(top).all():
        raise NotFiniteError("no logprobs: the model gave logits that are not finite")
    return top[:, None], total_mass(logits.softmax(dim=-1), token).log().float()


def listed(tokens: Tensor, logprobs: Tensor, counts: list[int]) -> list[tuple[list[int], list[float]]]:
    """Per row the ids and `logprobs` ([rows, n], in falling order, each) of its first `counts`, as far as they are
    possible."""
    possible = (logprobs > -inf).sum(dim=-1).tolist()
    rows = zip(tokens.tolist(), logprobs.tolist(), map(min, counts, possible), strict=True)
    return [(ids[:end], values[:end]) for ids, values, end in rows]


def _some_logprobs(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
    top, norm = log_norms(logits)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    values, tokens = largest(logits, max(1, *tops))
    ranks = _ranks(logits, chosen, values)
    rows = zip((chosen - top - norm).squeeze(1).tolist(), ranks, listed(tokens, values - top - norm, tops), strict=True)
    return [Logprobs(value, rank, ids, logprobs) for value, rank, (ids, logprobs) in rows]


def _ranks(logits: Tensor, chosen: Tensor, values: Tensor) -> list[int]:
    """1 plus the number of `logits` ([rows, vocab_size]) above each row's `chosen` ([rows, 1]); `values` ([rows, n])
    are the largest: those who are not below the last of them have all that is above them there."""
    ranks = (values > chosen).sum(dim=-1) + 1
    beyond = (chosen < values[:, -1:]).squeeze(1).nonzero().squeeze(1)
    if len(beyond):
        # In floats, which add up fast and count exactly to 2**24.
        above = torch.gt(logits.index_select(0, beyond), chosen[beyond]).float()
        ranks[beyond] = above.sum(dim=-1).long() + 1
    counted: list[int] = ranks.tolist()
    return counted
