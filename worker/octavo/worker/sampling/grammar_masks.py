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
from llguidance import LLTokenizer
from torch import Tensor

from octavo.runtime.models.grammar import GrammarError, is_lost
from octavo.wire.steps import GrammarTime, SequenceFailure
from octavo.worker.gpu.transfer import upload
from octavo.worker.process import available_cores
from octavo.worker.sampling.grammars import GrammarProgress, Grammars
from octavo.worker.sequences import Chooser, WorkerSequence
from octavo.worker.step.failures import bad_grammar

Bits = npt.NDArray[np.uint8]

# Masks that take no longer in all are not worth waking threads for.
_FEW_US = 500


@dataclass(frozen=True)
class Masks:
    """Holds the masks of the choosers with grammars in a step.

    `rows` maps a chooser to its row of `bits` ([rows, bytes], a bit for each token id, lowest first); no bit is set
    where the grammar refuses what is drafted. `failed` holds the sequences that no token may follow. `times` holds the
    share of each sequence in the time that all masks took.
    """

    rows: dict[Chooser, int]
    bits: Bits
    failed: dict[int, SequenceFailure]
    times: list[GrammarTime]

    def apply(self, logits: Tensor, choosers: list[Chooser]) -> None:
        """Sets to -inf the logits ([rows, vocab_size] fp32) of tokens that the grammars of `choosers` forbid.

        Token ids beyond the masks are forbidden as well.
        """
        constrained = [row for row, each in enumerate(choosers) if each.sampling.grammar]
        if not constrained:
            return
        bits = self.bits[[self.rows[choosers[row]] for row in constrained]]
        highest = _highest(bits, logits)
        if len(constrained) == len(logits):
            torch.minimum(logits, highest, out=logits)
            return
        index = upload(np.array(constrained), logits.device)
        logits.index_copy_(0, index, torch.minimum(logits.index_select(0, index), highest))


NO_MASKS = Masks({}, np.empty((0, 0), dtype=np.uint8), {}, [])


@dataclass(slots=True)
class _Task:
    """The masks of one sequence: that of its next token in `row`, then one for each token of a draft that fits."""

    sequence: WorkerSequence
    progress: GrammarProgress
    row: int
    draft: list[int]
    is_lost: bool = False
    nanoseconds: int = 0
    num_masks: int = 0

    def fill(self, bits: Bits, vocabulary: LLTokenizer) -> None:
        began = time.perf_counter_ns()
        self.is_lost = not self._fill_row(bits, self.row, vocabulary)
        if self.draft and not self.is_lost:
            for taken in self.progress.ahead(self.sequence, self.draft):
                if not self._fill_row(bits, self.row + taken, vocabulary):
                    bits[self.row + taken] = 0
        self.nanoseconds = time.perf_counter_ns() - began

    def _fill_row(self, bits: Bits, row: int, vocabulary: LLTokenizer) -> bool:
        """Fills one row, and tells whether it can be relied on."""
        self.num_masks += 1
        width, matcher = bits.shape[1], self.progress.matcher
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data + row * width, width)
        return not is_lost(matcher, bits[row], vocabulary)


def masks_of(choosers: list[Chooser], grammars: Grammars) -> Masks:
    """Computes the masks of the choosers that have grammars. All tokens of these choosers must be known."""
    constrained = [each for each in choosers if each.sampling.grammar]
    if not constrained:
        return NO_MASKS
    tasks: list[_Task] = []
    failures: dict[int, SequenceFailure] = {}
    clock = _RowClock(len(constrained))
    first_rows = [(row, each) for row, each in enumerate(constrained) if not each.num_drafted]
    for row, chooser in first_rows:
        with _failing(chooser.sequence, failures), clock.timed(row):
            tasks.append(_Task(chooser.sequence, grammars.progress(chooser.sequence), row, chooser.draft))
    bits = np.zeros((len(constrained), grammars.mask_bytes if tasks else 0), dtype=np.uint8)
    if tasks:
        _fill(bits, tasks, grammars.vocabulary, clock)
    for task in tasks:
        if task.is_lost:
            bits[task.row] = 0
            with _failing(task.sequence, failures), clock.timed(task.row):
                bits[task.row] = np.frombuffer(grammars.allowed_anew(task.sequence), dtype=np.uint8)
    num_masks = {task.row: task.num_masks for task in tasks}
    times = [
        GrammarTime(each.sequence_id, clock.microseconds(row) // num_masks.get(row, 1)) for row, each in first_rows
    ]
    return Masks({each: row for row, each in enumerate(constrained)}, bits, failures, times)


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

    def microseconds(self, row: int) -> int:
        return round(self._taken[row] / 1000)


def _fill(bits: Bits, tasks: list[_Task], vocabulary: LLTokenizer, clock: _RowClock) -> None:
    """Computes the mask rows of `tasks`, on several threads where that is worth it: the library releases Python's lock.

    The elapsed time is divided among the tasks by their shares of the work.
    """
    queue = iter(tasks)

    def work() -> None:
        # A free thread takes the next task: one may take as long as all others.
        for task in queue:
            task.fill(bits, vocabulary)

    expected_us = sum(task.progress.mask_us for task in tasks)
    num_helpers = min(available_cores(), len(tasks)) - 1 if expected_us > _FEW_US else 0
    began = time.perf_counter_ns()
    helpers = [_helpers().submit(work) for _ in range(num_helpers)]
    work()
    for helper in helpers:
        helper.result()
    share = (time.perf_counter_ns() - began) / max(1, sum(task.nanoseconds for task in tasks))
    for task in tasks:
        clock.add(task.row, task.nanoseconds * share)
        task.progress.mask_us = task.nanoseconds // 1000


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
