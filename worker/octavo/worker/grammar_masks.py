"""The masks of a step's sequences with grammars: filled on the CPU in one go, applied to logits on their device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from octavo.wire.grammar import GrammarError, is_lost
from octavo.wire.steps import SequenceFailure
from octavo.worker.cores import available_cores
from octavo.worker.failures import bad_grammar
from octavo.worker.gpu.transfer import upload
from octavo.worker.grammars import Grammars
from octavo.worker.sequences import WorkerSequence

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Masks:
    """Of some sequences: `rows` of `bits` ([rows, bytes], a bit for each token id, lowest first) by their ids, and the
    `failed` among them, which no token may follow."""

    rows: dict[int, int]
    bits: Bits
    failed: dict[int, SequenceFailure]

    def apply(self, logits: Tensor, sequences: list[WorkerSequence]) -> None:
        """Makes -inf of what may not come next in the rows of `logits` ([rows, vocab_size] fp32) whose sequences have
        grammars. Ids that the masks do not know may not."""
        constrained = [row for row, each in enumerate(sequences) if each.sampling.grammar]
        if not constrained:
            return
        bits = self.bits[[self.rows[sequences[row].sequence_id] for row in constrained]]
        highest = _highest(bits, logits)
        if len(constrained) == len(logits):
            torch.minimum(logits, highest, out=logits)
            return
        index = upload(np.array(constrained), logits.device)
        logits.index_copy_(0, index, torch.minimum(logits.index_select(0, index), highest))


NO_MASKS = Masks({}, np.empty((0, 0), dtype=np.uint8), {})


def masks_of(choosers: list[WorkerSequence], grammars: Grammars) -> Masks:
    """Those of the choosers that have grammars, all of whose tokens must be known."""
    constrained = [each for each in choosers if each.sampling.grammar]
    if not constrained:
        return NO_MASKS
    matchers: list[tuple[LLMatcher, int]] = []
    failures: dict[int, SequenceFailure] = {}
    for row, sequence in enumerate(constrained):
        with _failing(sequence, failures):
            matchers.append((grammars.matcher(sequence), row))
    bits = np.zeros((len(constrained), grammars.mask_bytes if matchers else 0), dtype=np.uint8)
    if matchers:
        _executor().unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1], len(bits))
    for matcher, row in matchers:
        if is_lost(matcher, bits[row], grammars.vocabulary):
            bits[row] = 0
            with _failing(constrained[row], failures):
                bits[row] = np.frombuffer(grammars.allowed_anew(constrained[row]), dtype=np.uint8)
    return Masks({each.sequence_id: row for row, each in enumerate(constrained)}, bits, failures)


@contextmanager
def _failing(sequence: WorkerSequence, failures: dict[int, SequenceFailure]) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        failures[sequence.sequence_id] = bad_grammar(sequence.sequence_id, str(error))


def _highest(bits: Bits, logits: Tensor) -> Tensor:
    """[rows, vocab_size]: what no logit may exceed, infinity or its negative."""
    packed = upload(bits, logits.device)
    highest = _of_bytes(logits.device).index_select(0, packed.view(-1).int()).view(len(bits), 8 * bits.shape[1])
    missing = logits.shape[1] - highest.shape[1]
    return torch.nn.functional.pad(highest, (0, missing), value=-inf) if missing > 0 else highest[:, : logits.shape[1]]


@cache
def _of_bytes(device: torch.device) -> Tensor:
    """[256, 8] fp32: infinity for each bit that is set in a byte, lowest first, its negative for the others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return upload(np.where(bits, np.float32(inf), np.float32(-inf)), device)


@cache
def _executor() -> LLExecutor:
    """Its threads wait where nothing is to be filled."""
    return LLExecutor(available_cores())
