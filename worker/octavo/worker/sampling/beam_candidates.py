"""What a beam search chooses from: the likeliest next tokens of each beam.

As transformers' beam search has it, processors change log-probabilities, not logits, and what they give is not made
to add up to one again. There is no temperature.
"""

from torch import Tensor

from octavo.wire.steps import Candidates
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.largest import largest
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.logprobs import listed, log_norms
from octavo.worker.sequences import WorkerSequence


def beam_candidates(logits: Tensor, beams: list[WorkerSequence], masks: Masks = NO_MASKS) -> list[Candidates]:
    """The candidates of each of `beams` from its row of `logits` ([rows, vocab_size] fp32, the model's own); `masks`
    of those with grammars.

    So many that, even if all that could end a hypothesis are among them, each beam can go on: those that no processor
    excludes, in falling order, equal ones by rising id. Raises `NotFiniteError`.
    """
    top, norm = log_norms(logits)
    counts = [num_candidates(beam) for beam in beams]
    logprobs = logits - top - norm
    if any(is_processed(beam) for beam in beams):
        process(logprobs, beams, masks)
    values, tokens = largest(logprobs, max(counts))
    rows = zip(beams, listed(tokens, values, counts), strict=True)
    return [Candidates(beam.sequence_id, token_ids, values) for beam, (token_ids, values) in rows]


def num_candidates(beam: WorkerSequence) -> int:
    """How many candidates are wanted of one beam."""
    assert beam.sampling.beam
    return max(2, 1 + len(beam.sampling.stop_token_ids)) * beam.sampling.beam.width
