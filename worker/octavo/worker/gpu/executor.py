"""The executor of steps on a GPU: it queues a step while earlier ones run, and reports it once its results are copied
back."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.gpu import sampler
from octavo.worker.gpu.chunk_inputs import ChunkInputs
from octavo.worker.gpu.graphs import CapturePlace, Outputs, StepGraphs, chunk_sizes, graph_sizes
from octavo.worker.gpu.inputs import SequenceRows, StepInputs, decodes_first
from octavo.worker.gpu.launched import GpuStep, Moves, Part, device_errors
from octavo.worker.gpu.logprobs import launch_prompt_logprobs
from octavo.worker.gpu.transfer import mark, upload
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.models.fused import FusedLlama
from octavo.worker.runner import LaunchedStep, Settle, nothing_pending
from octavo.worker.sampling.grammar_masks import masks_of
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import Chooser, WorkerSequence, WorkItem
from octavo.worker.step.batch import LogitRows, logit_rows
from octavo.worker.step.forward import Paging
from octavo.worker.step.kv_cache import KVCache

# A context of so many tokens before a small chunk is split between programs.
_CONTEXT = 1024
# A last token and guesses of at most so many rows are replayed: there each row reads all of its context for itself.
_MOST_REPLAYED = 8


logger = logging.getLogger(__name__)
# A row of logits for each of the choosers, the hidden states of the watched, and those of prompt tokens.
_Computed = tuple[Tensor, Tensor, Tensor]


def warm_up_items(paging: Paging, num_blocks: int, most_tokens: int) -> Iterator[WorkItem]:
    """Yields chunks of 1, 2, 4, ... up to `most_tokens` tokens, at the start of a prompt and after some context.

    Computing them compiles the kernels before any request waits for that. Chunks are as long as `num_blocks` free
    blocks have room for. Kernels are configured by powers of two at the finest.
    """
    room = min(paging.max_model_len, num_blocks // len(paging.groups) * paging.block_size)
    num_tokens = 1
    while num_tokens <= min(room, most_tokens):
        for start in sorted({0, min(room - num_tokens, _CONTEXT)}):
            yield _item(paging, start, num_tokens)
        num_tokens *= 2


def _item(paging: Paging, start: int, num_tokens: int) -> WorkItem:
    """Makes an item that chooses no token. Its context counts as computed: whatever the blocks hold costs as much."""
    length = start + num_tokens
    width = -(-length // paging.block_size)
    tables = [list(range(first, first + width)) for first in range(0, len(paging.groups) * width, width)]
    sequence = WorkerSequence(0, 0, SamplingParams(max_tokens=1), length, [0] * length, start, tables)
    return WorkItem(sequence, start, num_tokens, ())


class GpuExecutor:
    """Runs steps of `model` over the blocks of `cache`: decode steps, and those with few tokens of prompts, as CUDA
    graphs. Decode steps may have short drafts: a row of a draft is one more decode to a graph, of a sequence that has
    the same table and is longer by a token.

    `launch` waits for the device only where a grammar needs the tokens of the step before, and then after the model has
    been given this step's work. A step that finds no memory is computed without drafts, and then in halves.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, paging: Paging, grammars: Grammars, settings: ModelSettings
    ) -> None:
        self._model = model
        self._cache = cache
        self._paging = paging
        self._grammars = grammars
        self._device = paging.device
        width = -(-paging.max_model_len // paging.block_size)
        # Those of a step under way and of the next, which may be others; and one more, which belongs to no sequence.
        self._rows = SequenceRows(len(paging.groups), width, paging.device, 2 * settings.max_num_seqs + 1)
        self._inputs = StepInputs(paging, cache.layers, self._rows, settings.graph_batch)
        most_tokens = max(settings.graph_tokens, 1)
        self._chunk_inputs = ChunkInputs(paging, cache.layers, self._rows, settings.graph_batch, most_tokens)
        self._generation = 0
        self._graphs, self._chunk_graphs = self._captured(settings)
        if self._device.type == "cuda":
            self._warm_up(settings.max_num_batched_tokens)

    @property
    def table_bytes(self) -> int:
        """Returns the bytes that the executor keeps on the device throughout, beside model, blocks and graphs."""
        return self._rows.nbytes + self._inputs.nbytes + self._chunk_inputs.nbytes

    @torch.inference_mode()
    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> LaunchedStep:
        """Queues a step. Raises `DeviceLostError` if the device has stopped working, and what `settle` raises."""
        began = time.monotonic_ns()
        with device_errors():
            self._cache.move(moves)
            if not items:
                self._cache.finish_moves()
                return Moves(mark(self._device))
            self._cache.before_writing(_written_blocks(items, self._paging.block_size))
            try:
                parts = self._launch(decodes_first(items), settle)
            finally:
                if self._cache.num_cpu_blocks:
                    # As the tables are now: they change while the device computes.
                    self._cache.used([tuple(table) for item in items for table in item.sequence.block_tables])
            # The copies of the results were queued by the parts.
            ended = mark(self._device)
        return GpuStep(items, parts, (time.monotonic_ns() - began) // 1000, ended)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Lets go of what the device keeps of these sequences."""
        self._rows.forget(sequence_ids)

    @torch.inference_mode()
    def _warm_up(self, most_tokens: int) -> None:
        """Compiles the kernels now, and not while a request waits."""
        began = time.monotonic()
        num_blocks = len(self._cache.layers[0].keys)
        for size in (self._graphs.largest, 1):
            _, logits = self._graphs.replay(size)
        sampler.warm_up(logits)
        if num_blocks > 1:
            self._cache.move(BlockMoves(copy=[BlockMove(0, 1)]))
        # Steps with drafts or prompt logprobs launch what others have captured.
        chunk_graphs, self._chunk_graphs = self._chunk_graphs, self._no_graphs()
        for item in warm_up_items(self._paging, num_blocks, most_tokens):
            self.launch(BlockMoves(), [item]).output()
            self.forget([item.sequence.sequence_id])
        self._chunk_graphs = chunk_graphs
        logger.info("warmed up in %.1f s", time.monotonic() - began)

    @torch.inference_mode()
    def _captured(self, settings: ModelSettings) -> tuple[StepGraphs, StepGraphs]:
        """Captures the decode steps, and those with chunks of prompts. Models of transformers may use operations that
        cannot be captured; Octavo's own must not."""
        captured = settings.cuda_graphs and self._device.type == "cuda"
        place, sizes = CapturePlace(self._device), graph_sizes(settings.graph_batch)
        tokens = chunk_sizes(settings.graph_tokens if settings.cuda_graphs else 0)
        graphs = StepGraphs(self._decode, sizes, place, captured=captured)
        chunks = StepGraphs(self._chunks, tokens, place, captured=captured)
        try:
            graphs.capture_all()
            chunks.capture_all()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(self._model, FusedLlama):
                raise
            logger.warning("steps of this model cannot be captured, and run slower for it: %s", error)
            return StepGraphs(self._decode, sizes, place, captured=False), self._no_graphs()
        return graphs, chunks

    def _no_graphs(self) -> StepGraphs:
        return StepGraphs(self._chunks, [], CapturePlace(self._device), captured=False)

    def _launch(self, items: list[WorkItem], settle: Settle) -> list[Part]:
        try:
            return [self._launch_batch(items, settle)]
        except torch.OutOfMemoryError:
            if len(items) == 1 and items[0].num_tokens == 1:
                raise
        # Not where the error is handled: its traceback holds all that the step had taken.
        torch.cuda.empty_cache()
        if any(item.draft for item in items):
            logger.warning("no memory for %d tokens and guesses in one go; leaving the guesses out", _num_tokens(items))
            return self._launch([item.without_draft() for item in items], settle)
        logger.warning("no memory for %d tokens in one go; computing them in two", _num_tokens(items))
        first, second = halves(items)
        return [*self._launch(first, settle), *self._launch(second, settle)]

    def _launch_batch(self, items: list[WorkItem], settle: Settle) -> Part:
        wanted = logit_rows(items)
        self._send_tables(items)
        compute = self._prepared(items, wanted)
        # Time in which the device waits for the host to prepare is not the model's.
        began = mark(self._device)
        choosing, watched, prompt = compute()
        computed = mark(self._device)
        broken = sampler.launch_broken(watched, wanted.watched)
        prompts = launch_prompt_logprobs(
            wanted.prompt_spans, lambda first, last: self._model.logits(prompt[first:last])
        )
        # The step before ends, and masks are made, while the device computes this one.
        choosers = _settled(wanted.choosers, settle)
        masks = masks_of(choosers, self._grammars)
        choices = sampler.launch(choosing, choosers, masks, self._last_tokens(choosers))
        # This comes last: if memory runs out before, the same tokens are read once more.
        self._keep_tokens(choosers, choices.tokens)
        return Part(began, computed, choices, broken, prompts, masks.times)

    def _chunks(self, size: int) -> Outputs:
        return (self._model.forward(self._chunk_inputs.step(size)),)

    def _last_tokens(self, choosers: list[Chooser]) -> Tensor | None:
        """Returns the last tokens of `choosers`, [choosers] int64 on the device, if one is to be read that only the
        device knows."""
        if not any(each.sampling.is_penalised and each.sequence.has_pending_token for each in choosers):
            return None
        rows = [self._row_of_tokens(each) for each in choosers]
        return self._rows.next_tokens.index_select(0, _places(rows, self._device))

    def _row_of_tokens(self, chooser: Chooser) -> int:
        """Returns the row where the last token of `chooser` is kept; nobody's for one that has failed."""
        sequence = chooser.sequence
        return self._rows.discard_row if sequence.failure else self._rows.row_of(sequence)

    def _send_tables(self, items: list[WorkItem]) -> None:
        self._rows.assign(sequence for item in items for sequence in item.members)
        if self._rows.generation != self._generation:
            self._generation = self._rows.generation
            self._graphs.drop()
            self._chunk_graphs.drop()
        self._rows.send_tables(item.sequence for item in items)

    def _prepared(self, items: list[WorkItem], wanted: LogitRows) -> Callable[[], _Computed]:
        """Queues the inputs of `items` and returns the function that computes them."""
        if self._may_replay(items) and not wanted.prompt_spans:
            size = self._graphs.padded(_num_tokens(items))
            self._inputs.fill(items, size)
            return partial(self._replay, size, wanted)
        if self._is_captured(items, wanted):
            size = self._chunk_graphs.padded(_num_tokens(items))
            self._chunk_inputs.fill(items, wanted.rows, size)
            return partial(self._replay_chunks, size, wanted)
        return partial(self._forward, self._inputs.step(items, wanted.rows), wanted)

    def _may_replay(self, items: list[WorkItem]) -> bool:
        """Tells whether a graph computes `items`: one token each, and what is guessed to follow."""
        decodes = all(item.num_known == 1 and item.num_tokens <= _MOST_REPLAYED for item in items)
        return decodes and _num_tokens(items) <= self._graphs.largest

    def _is_captured(self, items: list[WorkItem], wanted: LogitRows) -> bool:
        """Tells whether there is a graph for chunks and decodes like `items`, each of which wants one row at most."""
        if _num_tokens(items) > self._chunk_graphs.largest or wanted.prompt_spans:
            return False
        return not any(item.looks_ahead for item in items) and self._chunk_inputs.fits(items)

    def _replay(self, size: int, wanted: LogitRows) -> _Computed:
        hidden, logits = self._graphs.replay(size)
        choosers = _rows(logits, [wanted.rows[index] for index in wanted.chooser_rows])
        return choosers, _rows(hidden, wanted.rows[wanted.num_choosing :]), hidden[:0]

    def _replay_chunks(self, size: int, wanted: LogitRows) -> _Computed:
        [hidden] = self._chunk_graphs.replay(size)
        return self._computed(hidden[: len(wanted.rows)], wanted)

    def _forward(self, step: PagedStep, wanted: LogitRows) -> _Computed:
        return self._computed(self._model.forward(step), wanted)

    def _computed(self, hidden: Tensor, wanted: LogitRows) -> _Computed:
        """Divides the hidden states of the `wanted` rows, and computes the logits of those that choose."""
        counts = [wanted.num_choosing, len(wanted.watched)]
        choosing, watched, prompt = torch.split(hidden, [*counts, len(hidden) - sum(counts)])
        return _rows(self._model.logits(choosing), wanted.chooser_rows), watched, prompt

    def _decode(self, size: int) -> Outputs:
        hidden = self._model.forward(self._inputs.decode_step(size))
        return hidden, self._model.logits(hidden)

    def _keep_tokens(self, choosers: list[Chooser], tokens: Tensor) -> None:
        """Keeps the chosen tokens on the device for the next step; those of beams the scheduler chooses, and after a
        draft it waits for the answer."""
        rows = [
            self._rows.discard_row if chooser.sampling.beam or chooser.draft else self._row_of_tokens(chooser)
            for chooser in choosers
        ]
        if rows:
            self._rows.next_tokens.index_copy_(0, _places(rows, self._device), tokens)


def _settled(choosers: list[Chooser], settle: Settle) -> list[Chooser]:
    """Returns `choosers` once all tokens that the CPU must read are known: a sequence that has failed meanwhile has
    none, and chooses without a grammar what nobody will see."""
    if not any(each.sequence.reads_generated and each.sequence.has_pending_token for each in choosers):
        return choosers
    settle()
    return [_plain(each) if each.sequence.failure else each for each in choosers]


def _plain(chooser: Chooser) -> Chooser:
    sequence = replace(chooser.sequence, sampling=SamplingParams(max_tokens=chooser.sampling.max_tokens))
    return Chooser(sequence, chooser.draft, chooser.num_drafted)


def halves(items: list[WorkItem]) -> tuple[list[WorkItem], list[WorkItem]]:
    """Divides `items`, of more than one token and without drafts, in two; a single item is cut into two chunks.

    The first half writes what the second half reads.
    """
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
    """Returns these rows of `tensor`; a view if they are its first ones."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor.index_select(0, _places(rows, tensor.device))
