"""The candidates of beams on the device: launched now, listed once they have been copied back."""

from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.triton.sampling.stats import log_masses
from octavo.wire.steps import Candidates
from octavo.worker.gpu.transfer import download
from octavo.worker.sampling.beam_candidates import num_candidates
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.largest import ranked
from octavo.worker.sampling.logits_processors import is_processed, process
from octavo.worker.sampling.logprobs import listed
from octavo.worker.sequences import WorkerSequence


@dataclass(frozen=True)
class DeviceCandidates:
    """On the CPU once the step is read back: the `token_ids` and `logprobs` of each of the `beams`, [beams, n] each, of
    which `counts` are wanted."""

    beams: list[WorkerSequence]
    token_ids: Tensor
    logprobs: Tensor
    counts: list[int]

    def listed(self) -> list[Candidates]:
        """Of every beam; what is said of one whose logits are not finite is void."""
        rows = zip(self.beams, listed(self.token_ids, self.logprobs, self.counts), strict=True)
        return [Candidates(beam.sequence_id, token_ids, values) for beam, (token_ids, values) in rows]


def launch_candidates(logits: Tensor, beams: list[WorkerSequence], masks: Masks = NO_MASKS) -> DeviceCandidates:
    """`octavo.worker.sampling.beam_candidates.beam_candidates` of `logits` ([beams, vocab_size] of any float dtype,
    one row at least), whose numbers do not depend on the rows beside a row."""
    counts = [num_candidates(beam) for beam in beams]
    largest, norm = log_masses(logits)
    logprobs = logits.float() - largest[:, None] - norm[:, None]
    if any(is_processed(beam) for beam in beams):
        process(logprobs, beams, masks)
    values, token_ids = ranked(logprobs, max(counts))
    return DeviceCandidates(beams, download(token_ids), download(values), counts)
