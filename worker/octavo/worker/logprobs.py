"""Log-probabilities under the model's own distribution, and the likeliest tokens with theirs."""

from math import inf

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.worker.masses import total_mass

# Rows done at a time: a long prompt's logits would otherwise be held in several copies of eight bytes each.
_ROWS = 64


def token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    """The logprob and rank of each row's token, and the `top` likeliest tokens.

    `logits` are [rows, vocab_size] of any float dtype, as the model gave them; one of `token_ids` per row. The rank is
    1 plus the number of tokens that are strictly likelier. The likeliest come in falling order, equal ones by rising
    id; fewer than `top` if the vocabulary has no more with a probability above 0.

    Raises `ValueError` as `log_softmax` does.
    """
    return row_logprobs(logits, token_ids, [top] * len(token_ids))


def row_logprobs(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
    """`token_logprobs` with a number of likeliest tokens for each row."""
    found: list[Logprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        rows = slice(start, start + _ROWS)
        found += _some_logprobs(log_softmax(logits[rows].float()), token_ids[rows], tops[rows])
    return found


def log_softmax(logits: Tensor) -> Tensor:
    """[rows, vocab_size] fp32 logprobs of fp32 `logits`, each row's the same whatever rows are beside it.

    Raises `ValueError` if a row has a NaN, a positive infinity, or nothing finite.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise ValueError(
            "no logprobs: the model gave logits that are not finite; its weights are broken or overflow in this dtype"
            " (try --dtype float32)"
        )
    shifted = logits - largest
    return shifted - total_mass(shifted).log().float()


def likeliest(logprobs: Tensor, counts: list[int]) -> list[tuple[list[int], list[float]]]:
    """Per row of `logprobs` ([rows, vocab_size] fp32, no NaN) the ids and values of as many largest ones as `counts`
    says, fewer where the others are -inf; in falling order, equal ones by rising id."""
    tokens = _ranking(logprobs).topk(min(max(counts), logprobs.shape[1]), dim=-1).indices
    values = logprobs.gather(1, tokens)
    possible = (values > -inf).sum(dim=-1).tolist()
    ends = [min(pair) for pair in zip(counts, possible, strict=True)]
    rows = zip(tokens.tolist(), values.tolist(), ends, strict=True)
    return [(ids[:end], row_values[:end]) for ids, row_values, end in rows]


def _some_logprobs(logprobs: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = likeliest(logprobs, tops) if any(tops) else [([], [])] * len(tops)
    rows = zip(chosen.squeeze(1).tolist(), ranks.tolist(), top, strict=True)
    return [Logprobs(value, rank, ids, values) for value, rank, (ids, values) in rows]


def _ranking(values: Tensor) -> Tensor:
    """Distinct int64 keys that order fp32 `values` ([rows, n]) by size and equal ones by falling index.

    Above: the value's bits, whose integers order positive floats; those of negative ones are turned round. Below: the
    distance from the end. (A selection by value alone would leave open which of several equal ones it takes.)
    """
    bits = (values + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0, its equal.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    size = values.shape[1]
    return (ordered << 32) + torch.arange(size - 1, -1, -1, device=values.device)
