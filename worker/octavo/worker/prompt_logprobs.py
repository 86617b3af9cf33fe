"""How likely a model found the tokens of a prompt."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import PromptLogprobs
from octavo.worker.batch import PromptSpan
from octavo.worker.logprobs import token_logprobs

# A whole prompt's logits would be larger than many a model.
_ROWS = 256


def prompt_logprobs(
    hidden: Tensor, spans: list[PromptSpan], to_logits: Callable[[Tensor], Tensor]
) -> list[PromptLogprobs]:
    """The logprobs of each span's tokens. `hidden`: [rows, hidden_size], those before the tokens, span after span;
    `to_logits` makes [rows, vocab_size] of some of them. Raises `ValueError` on logits that are not finite."""
    parts = torch.split(hidden, [span.length for span in spans])
    return [
        PromptLogprobs(span.sequence.sequence_id, span.start, list(_logprobs(part, span, to_logits)))
        for part, span in zip(parts, spans, strict=True)
    ]


def _logprobs(hidden: Tensor, span: PromptSpan, to_logits: Callable[[Tensor], Tensor]) -> Iterator[Logprobs]:
    top = span.sequence.sampling.prompt_logprobs
    assert top is not None, "a span is made of a sequence that wants its prompt's logprobs"
    token_ids = span.sequence.token_ids[span.start : span.start + span.length]
    for first in range(0, span.length, _ROWS):
        rows = slice(first, first + _ROWS)
        yield from token_logprobs(to_logits(hidden[rows]), token_ids[rows], top)
