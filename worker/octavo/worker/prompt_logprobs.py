"""How likely a model found the tokens of a prompt."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import PromptLogprobs, SequenceFailure
from octavo.worker.batch import PromptSpan
from octavo.worker.failures import not_finite
from octavo.worker.logprobs import NotFiniteError, token_logprobs

# A whole prompt's logits would be larger than many a model.
_ROWS = 256


def prompt_logprobs(
    hidden: Tensor, spans: list[PromptSpan], to_logits: Callable[[Tensor], Tensor]
) -> tuple[list[PromptLogprobs], list[SequenceFailure]]:
    """The logprobs of each span's tokens, and the sequences that fail because theirs are not finite. `hidden`: [rows,
    hidden_size], those before the tokens, span after span; `to_logits` makes [rows, vocab_size] of some of them."""
    if not spans:
        return [], []
    found: list[PromptLogprobs] = []
    failed: list[SequenceFailure] = []
    for part, span in zip(torch.split(hidden, [span.length for span in spans]), spans, strict=True):
        sequence_id = span.sequence.sequence_id
        try:
            found.append(PromptLogprobs(sequence_id, span.start, list(_logprobs(part, span, to_logits))))
        except NotFiniteError:
            failed.append(not_finite(sequence_id))
    return found, failed


def _logprobs(hidden: Tensor, span: PromptSpan, to_logits: Callable[[Tensor], Tensor]) -> Iterator[Logprobs]:
    top = span.sequence.sampling.prompt_logprobs
    assert top is not None, "a span is made of a sequence that wants its prompt's logprobs"
    token_ids = span.sequence.token_ids[span.start : span.start + span.length]
    for first in range(0, span.length, _ROWS):
        rows = slice(first, first + _ROWS)
        yield from _some_logprobs(to_logits(hidden[rows]), token_ids[rows], top)


def _some_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    if logits.device.type == "cpu":
        return token_logprobs(logits, token_ids, top)
    # It takes Triton, which a worker on a CPU does without.
    from octavo.worker.gpu.logprobs import device_token_logprobs

    return device_token_logprobs(logits, token_ids, top)
