"""Log-probabilities under the model's own distribution, with the most likely tokens, for chosen tokens and prompt
tokens."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import PromptLogprobs, SequenceFailure
from octavo.worker.sampling.row_reductions import argmax, largest, logarithms, total_weight
from octavo.worker.step.batch import PromptSpan
from octavo.worker.step.failures import not_finite

# Rows done at a time: a long prompt's logits would otherwise be held in several copies.
_ROWS = 64


# A whole prompt's logits would be larger than many a model.
PROMPT_ROWS = 256
LogitsOf = Callable[[int, int], Tensor]


class NotFiniteError(ValueError):
    """Raised for a row of logits with a NaN, a positive infinity, or nothing finite."""


def token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    """Returns the logprob and rank of each row's token, and the `top` most likely tokens.

    `logits` is [rows, vocab_size] of any float dtype, as the model gave it; `token_ids` holds one id per row. The rank
    is 1 plus the number of tokens that are strictly more likely. The most likely tokens come in falling order, equal
    ones by rising id; they are fewer than `top` if the vocabulary has no more with a probability above 0.

    Raises `NotFiniteError`.
    """
    return row_logprobs(logits, token_ids, [top] * len(token_ids))


def row_logprobs(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
    """Returns what `token_logprobs` does, with a number of most likely tokens for each row."""
    found: list[Logprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        rows = slice(start, start + _ROWS)
        found += _some_logprobs(logits[rows].float(), token_ids[rows], tops[rows])
    return found


def log_norms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row, and the logarithm of the sum of all exponentials relative to it, [rows, 1]
    fp32 each.

    `logits` is [rows, vocab_size] fp32. A row's results are the same whatever rows are beside it. A logprob is the
    logit less both, one after the other.

    Raises `NotFiniteError`.
    """
    top, _ = argmax(logits)
    if not torch.isfinite(top).all():
        raise NotFiniteError("no logprobs: the model gave logits that are not finite")
    return top[:, None], logarithms(total_weight(logits, top, torch.ones_like(top))).float()


def listed(tokens: Tensor, logprobs: Tensor, counts: list[int]) -> list[tuple[list[int], list[float]]]:
    """Returns, for each row, the ids and `logprobs` ([rows, n] each, in falling order) of its first `counts` tokens, as
    far as these are possible."""
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
    """Returns 1 plus the number of `logits` ([rows, vocab_size]) above each row's `chosen` ([rows, 1]).

    `values` ([rows, n]) holds each row's largest logits. If `chosen` is not below the last of them, all logits above it
    are among them.
    """
    ranks = (values > chosen).sum(dim=-1) + 1
    beyond = (chosen < values[:, -1:]).squeeze(1).nonzero().squeeze(1)
    if len(beyond):
        # In floats, which add up fast and count exactly to 2**24.
        above = torch.gt(logits.index_select(0, beyond), chosen[beyond]).float()
        ranks[beyond] = above.sum(dim=-1).long() + 1
    counted: list[int] = ranks.tolist()
    return counted


def prompt_logprobs(spans: list[PromptSpan], logits_of: LogitsOf) -> tuple[list[PromptLogprobs], list[SequenceFailure]]:
    """Returns the logprobs of each span's tokens, and the failures of sequences whose logits are not finite.

    `logits_of(first, last)` gives the logits ([rows, vocab_size]) of rows `first` to `last` - 1, counted over the spans
    in their order; a row is the one before a prompt token.
    """
    found: list[PromptLogprobs] = []
    failed: list[SequenceFailure] = []
    first_rows = accumulate((span.length for span in spans), initial=0)
    for first_row, span in zip(first_rows, spans, strict=False):
        sequence_id = span.sequence.sequence_id
        try:
            found.append(PromptLogprobs(sequence_id, span.start, list(_logprobs(span, first_row, logits_of))))
        except NotFiniteError:
            failed.append(not_finite(sequence_id))
    return found, failed


def _logprobs(span: PromptSpan, first_row: int, logits_of: LogitsOf) -> Iterator[Logprobs]:
    top = span.sequence.sampling.prompt_logprobs
    assert top is not None, "a span is made of a sequence that wants its prompt's logprobs"
    token_ids = span.sequence.token_ids[span.start : span.start + span.length]
    for first in range(0, span.length, PROMPT_ROWS):
        last = min(first + PROMPT_ROWS, span.length)
        yield from _row_chunk_logprobs(logits_of(first_row + first, first_row + last), token_ids[first:last], top)


def _row_chunk_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    if logits.device.type == "cpu":
        return token_logprobs(logits, token_ids, top)
    # The import needs Triton, which a worker on a CPU does without.
    from octavo.worker.gpu.logprobs import device_token_logprobs

    return device_token_logprobs(logits, token_ids, top)
