"""How likely a model found the tokens of a prompt."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import PromptLogprobs, SequenceFailure
from octavo.worker.sampling.logprobs import NotFiniteError, token_logprobs
from octavo.worker.step.batch import PromptSpan
from octavo.worker.step.failures import not_finite

# A whole prompt's logits would be larger than many a model.
_ROWS = 256

LogitsOf = Callable[[int, int], Tensor]


def prompt_logprobs(spans: list[PromptSpan], logits_of: LogitsOf) -> tuple[list[PromptLogprobs], list[SequenceFailure]]:
    """The logprobs of each span's tokens, and the sequences that fail because theirs are not finite. `logits_of` gives
    the logits ([rows, vocab_size]) of the rows from one to before another, of those before the tokens, span after
    span."""
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
    for first in range(0, span.length, _ROWS):
        last = min(first + _ROWS, span.length)
        yield from _some_logprobs(logits_of(first_row + first, first_row + last), token_ids[first:last], top)


def _some_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[Logprobs]:
    if logits.device.type == "cpu":
        return token_logprobs(logits, token_ids, top)
    # It takes Triton, which a worker on a CPU does without.
    from octavo.worker.gpu.logprobs import device_token_logprobs

    return device_token_logprobs(logits, token_ids, top)
