"""Steps on a GPU: queued while the ones before them still run, and told of once their results have come back."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.wire.steps import BlockMoves, PromptLogprobs, SequenceFailure, StepTimes
from octavo.worker import device_sampler
from octavo.worker.batch import LogitRows, logit_rows
from octavo.worker.device_sampler import DeviceBroken, DeviceChoices
from octavo.worker.gpu.graphs import DecodeGraphs, Outputs
from octavo.worker.gpu.inputs import StepInputs, decodes_first
from octavo.worker.gpu.options import GpuOptions
from octavo.worker.gpu.rows import SequenceRows
from octavo.worker.gpu.timeline import Mark, mark
from octavo.worker.gpu.transfer import upload
from octavo.worker.kv_cache import KVCache
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.fused import FusedLlama
from octavo.worker.paging import Paging
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.readback import Readback
from octavo.worker.runner import DeviceLostError, LaunchedStep, StepOutput
from octavo.worker.sequences import WorkItem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """What was queued for some of a step's items, and what will come back of it."""

    choices: DeviceChoices
    broken: DeviceBroken
    prompts: list[PromptLogprobs]
    failed_prompts: list[SequenceFailure]

    def output(self, times: StepTimes) -> StepOutput:
        choices = self.choices.choices()
        failed = [*self.broken.failures(), *self.failed_prompts]
        return StepOutput(choices.sampled, choices.candidates, self.prompts, choices.failed, times).without(failed)


class GpuStep:
    """`octavo.worker.runner.LaunchedStep`: `parts` of the items, computed one after the other, mostly one."""

    def __init__(self, items: list[WorkItem], parts: list[_Part], prepare_us: int, marks: tuple[Mark, Mark, Mark]):
        self._items = items
        self._parts = parts
        self._prepare_us = prepare_us
        self._began, self._computed, self._ended = marks

    def ready(self) -> bool:
        with _device_errors():
            return self._ended.passed()

    def output(self) -> StepOutput:
        with _device_errors():
            self._ended.wait()
        times = StepTimes(
            self._prepare_us,
            self._computed.microseconds_since(self._began),
            self._ended.microseconds_since(self._computed),
        )
        return _in_order(self._items, [part.output(times) for part in self._parts], times)


class GpuExecutor:
    """Runs steps of `model` over the blocks of `cache`, decode steps as CUDA graphs.

    Nothing in `launch` waits for the device, but for swaps that a step depends on and prompt logprobs. A step that
    finds no memory is computed in halves.
    """

    def __init__(self, model: Decoder, cache: KVCache, paging: Paging, options: GpuOptions) -> None:
        self._model = model
        self._cache = cache
        self._paging = paging
        self._device = paging.device
        width = -(-paging.max_model_len // paging.block_size)
        self._rows = SequenceRows(len(paging.groups), width, paging.device)
        self._inputs = StepInputs(paging, cache.layers, self._rows, options.graph_batch)
        self._generation = 0
        self._graphs = self._captured(options)

    @torch.inference_mode()
    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> LaunchedStep:
        """Raises `DeviceLostError` if the device is beyond help."""
        began = time.monotonic_ns()
        with _device_errors():
            self._cache.move(moves)
            if not items:
                self._cache.finish_moves()
                return _Moves(mark(self._device))
            start = mark(self._device)
            self._cache.before_writing(_written_blocks(items, self._paging.block_size))
            parts, computed = self._launch(decodes_first(items))
            # The copies of the results were queued by the parts.
            ended = mark(self._device)
        return GpuStep(items, parts, (time.monotonic_ns() - began) // 1000, (start, computed, ended))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Lets go of what the device keeps of them."""
        self._rows.forget(sequence_ids)

    @torch.inference_mode()
    def _captured(self, options: GpuOptions) -> DecodeGraphs:
        """Models of transformers may do what cannot be captured; Octavo's own must not."""
        captured = options.cuda_graphs and self._device.type == "cuda"
        graphs = DecodeGraphs(self._decode, options.graph_batch, self._device, captured=captured)
        try:
            graphs.capture_all()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(self._model, FusedLlama):
                raise
            logger.warning("decode steps of this model cannot be captured, and run slower for it: %s", error)
            return DecodeGraphs(self._decode, options.graph_batch, self._device, captured=False)
        return graphs

    def _launch(self, items: list[WorkItem]) -> tuple[list[_Part], Mark]:
        """The parts, and when the model was computed for the last of them."""
        try:
            part, computed = self._launch_batch(items)
        except torch.OutOfMemoryError:
            if len(items) == 1 and items[0].num_tokens == 1:
                raise
            logger.warning("no memory for %d tokens in one go; computing them in two", _num_tokens(items))
            torch.cuda.empty_cache()
            first, second = halves(items)
            parts, _ = self._launch(first)
            others, computed = self._launch(second)
            return [*parts, *others], computed
        return [part], computed

    def _launch_batch(self, items: list[WorkItem]) -> tuple[_Part, Mark]:
        wanted = logit_rows(items)
        self._tell_device(items)
        choosing, watched, prompt = self._compute(items, wanted)
        computed = mark(self._device)
        readback = Readback(self._device)
        choices = device_sampler.launch(choosing, wanted.choosers, readback)
        self._keep_tokens(wanted, choices.tokens)
        broken = device_sampler.launch_broken(watched, wanted.watched, readback)
        prompts, failed = prompt_logprobs(prompt, wanted.prompt_spans, self._model.logits)
        return _Part(choices, broken, prompts, failed), computed

    def _tell_device(self, items: list[WorkItem]) -> None:
        for item in items:
            for sequence in item.members:
                self._rows.row_of(sequence)
        if self._rows.generation != self._generation:
            self._generation = self._rows.generation
            self._graphs.drop()
        self._rows.tell(item.sequence for item in items)

    def _compute(self, items: list[WorkItem], wanted: LogitRows) -> tuple[Tensor, Tensor, Tensor]:
        """A row of logits for each of the choosers, the hidden states of the watched, and of the prompt tokens."""
        num_choosing, num_watched = wanted.num_choosing, len(wanted.watched)
        if _num_tokens(items) == len(items) <= self._graphs.largest and not wanted.prompt_spans:
            hidden, logits = self._replay(items)
            choosers = _rows(logits, [wanted.rows[index] for index in wanted.chooser_rows])
            return choosers, _rows(hidden, wanted.rows[num_choosing:]), hidden[:0]
        hidden = self._model.forward(self._inputs.step(items, wanted.rows))
        counts = [num_choosing, num_watched, len(hidden) - num_choosing - num_watched]
        choosing, watched, prompt = torch.split(hidden, counts)
        return _rows(self._model.logits(choosing), wanted.chooser_rows), watched, prompt

    def _replay(self, items: list[WorkItem]) -> Outputs:
        size = self._graphs.padded(len(items))
        self._inputs.fill(items, size)
        return self._graphs.replay(size)

    def _decode(self, size: int) -> Outputs:
        hidden = self._model.forward(self._inputs.decode_step(size))
        return hidden, self._model.logits(hidden)

    def _keep_tokens(self, wanted: LogitRows, tokens: Tensor) -> None:
        """So that the next step finds them. Those of beams the scheduler chooses."""
        rows = [
            self._rows.nobody if chooser.sampling.beam else self._rows.row_of(chooser) for chooser in wanted.choosers
        ]
        if rows:
            self._rows.next_tokens.index_copy_(0, _places(rows, self._device), tokens)


@dataclass(frozen=True)
class _Moves:
    """A step that only moves blocks."""

    ended: Mark

    def ready(self) -> bool:
        return self.ended.passed()

    def output(self) -> StepOutput:
        with _device_errors():
            self.ended.wait()
        return StepOutput([], [], [], [], StepTimes(0, 0, 0))


def halves(items: list[WorkItem]) -> tuple[list[WorkItem], list[WorkItem]]:
    """`items`, of more than one token, in two: a single one is cut into two chunks. What the second half reads, the
    first has written."""
    if len(items) > 1:
        return items[: len(items) // 2], items[len(items) // 2 :]
    [item] = items
    half = item.num_tokens // 2
    first = WorkItem(item.sequence, item.start, half, ())
    return [first], [WorkItem(item.sequence, item.start + half, item.num_tokens - half, item.choosers)]


def _num_tokens(items: list[WorkItem]) -> int:
    return sum(item.num_tokens for item in items)


def _written_blocks(items: list[WorkItem], block_size: int) -> Iterator[int]:
    for item in items:
        for table in item.sequence.block_tables:
            yield from table[item.start // block_size : (item.end - 1) // block_size + 1]


def _places(indices: list[int], device: torch.device) -> Tensor:
    return upload(np.array(indices, dtype=np.int64), device)


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows of `tensor`; a view if they are its first ones."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor.index_select(0, _places(rows, tensor.device))


def _in_order(items: list[WorkItem], outputs: list[StepOutput], times: StepTimes) -> StepOutput:
    """One output of all parts, in the order of `items`."""
    members = (sequence.sequence_id for item in items for sequence in item.members)
    place = {sequence_id: index for index, sequence_id in enumerate(members)}

    def ordered(answers: Iterable[Any]) -> list[Any]:
        return sorted(answers, key=lambda answer: place[answer.sequence_id])

    failed = {failure.sequence_id: failure for output in outputs for failure in output.failed}
    return StepOutput(
        ordered(each for output in outputs for each in output.sampled),
        ordered(each for output in outputs for each in output.candidates),
        ordered(_joined(each for output in outputs for each in output.prompt_logprobs)),
        [],
        times,
    ).without(ordered(failed.values()))


def _joined(parts: Iterable[PromptLogprobs]) -> Iterable[PromptLogprobs]:
    """One of each sequence: halves of a prompt come one after the other."""
    found: dict[int, PromptLogprobs] = {}
    for part in parts:
        before = found.get(part.sequence_id)
        logprobs = [*before.logprobs, *part.logprobs] if before else part.logprobs
        found[part.sequence_id] = PromptLogprobs(part.sequence_id, (before or part).start, logprobs)
    return found.values()


@contextmanager
def _device_errors() -> Iterator[None]:
    """After an error of its own a CUDA device does nothing more for this process; a lack of memory is none."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise DeviceLostError(str(error)) from error
        raise
