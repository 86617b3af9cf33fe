"""The masks of a step's sequences with grammars, which are filled on the CPU, timed, and applied to logits on their
device."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from torch import Tensor

from octavo.runtime.models.grammar import GrammarError, is_lost
from octavo.wire.steps import GrammarTime, SequenceFailure
from octavo.worker.gpu.transfer import upload
from octavo.worker.process import available_cores
from octavo.worker.sampling.grammars import GrammarProgress, Grammars
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.failures import bad_grammar

Bits = npt.NDArray[np.uint8]

# Masks that take no longer in all are not worth waking threads for.
_FEW_US = 500


@dataclass(frozen=True)
class Masks:
    """Holds the masks of the sequences with grammars in a step.

    `rows` maps a sequence's id to its row of `bits` ([rows, bytes], a bit for each token id, lowest first). `failed`
    holds the sequences that no token may follow. `times` holds the share of each sequence in the time that all masks
    took.
    """

    rows: dict[int, int]
    bits: Bits
    failed: dict[int, SequenceFailure]
    times: list[GrammarTime]

    def apply(self, logits: Tensor, sequences: list[WorkerSequence]) -> None:
        """Sets to -inf the logits ([rows, vocab_size] fp32) of tokens that the grammars of `sequences` forbid.

        Token ids beyond the masks are forbidden as well.
        """
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


NO_MASKS = Masks({}, np.empty((0, 0), dtype=np.uint8), {}, [])


def masks_of(choosers: list[WorkerSequence], grammars: Grammars) -> Masks:
    """Computes the masks of the choosers that have grammars. All tokens of these choosers must be known."""
    constrained = [each for each in choosers if each.sampling.grammar]
    if not constrained:
        return NO_MASKS
    matchers: list[tuple[LLMatcher, int]] = []
    failures: dict[int, SequenceFailure] = {}
    clock = _RowClock(len(constrained))
    for row, sequence in enumerate(constrained):
        with _failing(sequence, failures), clock.timed(row):
            matchers.append((grammars.matcher(sequence), row))
    bits = np.zeros((len(constrained), grammars.mask_bytes if matchers else 0), dtype=np.uint8)
    _fill(bits, matchers, [each.follower for each in constrained], clock)
    for matcher, row in matchers:
        if is_lost(matcher, bits[row], grammars.vocabulary):
            bits[row] = 0
            with _failing(constrained[row], failures), clock.timed(row):
                bits[row] = np.frombuffer(grammars.allowed_anew(constrained[row]), dtype=np.uint8)
    ids = [each.sequence_id for each in constrained]
    return Masks({each: row for row, each in enumerate(ids)}, bits, failures, clock.times(ids))


class _RowClock:
    """Counts how long each row has held up the step, in nanoseconds."""

    def __init__(self, num_rows: int) -> None:
        self._taken = [0.0] * num_rows

    @contextmanager
    def timed(self, row: int) -> Iterator[None]:
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._taken[row] += time.perf_counter_ns() - began

    def add(self, row: int, taken: float) -> None:
        self._taken[row] += taken

    def times(self, sequence_ids: list[int]) -> list[GrammarTime]:
        return [GrammarTime(i, round(taken / 1000)) for i, taken in zip(sequence_ids, self._taken, strict=True)]


def _fill(
    bits: Bits, matchers: list[tuple[LLMatcher, int]], followers: list[GrammarProgress | None], clock: _RowClock
) -> None:
    """Computes the mask rows of `matchers`, on several threads where that is worth it: the library releases Python's
    lock.

    The elapsed time is divided among the rows by their shares of the work.
    """
    queue, address, width = iter(matchers), bits.ctypes.data, bits.shape[1]
    taken: dict[int, int] = {}

    def work() -> None:
        # A free thread takes the next row: one row may take as long as all others.
        for matcher, row in queue:
            began = time.perf_counter_ns()
            matcher.unsafe_compute_mask_ptr(address + row * width, width)
            taken[row] = time.perf_counter_ns() - began

    expected_us = sum(follower.mask_us for follower in followers if follower)
    num_helpers = min(available_cores(), len(matchers)) - 1 if expected_us > _FEW_US else 0
    began = time.perf_counter_ns()
    helpers = [_helpers().submit(work) for _ in range(num_helpers)]
    work()
    for helper in helpers:
        helper.result()
    share = (time.perf_counter_ns() - began) / max(1, sum(taken.values()))
    for row, nanoseconds in taken.items():
        clock.add(row, nanoseconds * share)
        if (follower := followers[row]) is not None:
            follower.mask_us = nanoseconds // 1000


@contextmanager
def _failing(sequence: WorkerSequence, failures: dict[int, SequenceFailure]) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        failures[sequence.sequence_id] = bad_grammar(sequence.sequence_id, str(error))


def _highest(bits: Bits, logits: Tensor) -> Tensor:
    """Returns [rows, vocab_size]: infinity where a token is allowed, minus infinity where it is not."""
    packed = upload(bits, logits.device)
    highest = _of_bytes(logits.device).index_select(0, packed.view(-1).int()).view(len(bits), 8 * bits.shape[1])
    missing = logits.shape[1] - highest.shape[1]
    return torch.nn.functional.pad(highest, (0, missing), value=-inf) if missing > 0 else highest[:, : logits.shape[1]]


@cache
def _of_bytes(device: torch.device) -> Tensor:
    """Returns [256, 8] fp32: for each byte, infinity for each bit that is set, lowest first, its negative for the
    others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return upload(np.where(bits, np.float32(inf), np.float32(-inf)), device)


@cache
def _helpers() -> ThreadPoolExecutor:
    """Returns the pool of threads, which wait while there is nothing to fill."""
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="masks")
