"""A second, smaller model that guesses what the model will say, with keys and values of its own in the same blocks.

While guesses are asked for, it computes every token that the model computes, in the same step. Where none have been for
some steps it sleeps: it costs nothing then, and keys and values of its own are missing in blocks. Each block says how
many there are, and takes that along where it is copied, swapped, moved or kept. A sequence of which guesses are asked
for again is caught up with first; so is one that begins with what was computed while the draft model slept.

Where all KV groups have windows, what these have passed is gone. The draft model begins anew then where the window
does, as if nothing had been before: that costs guesses for as long as its window still holds such tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from tokenizers import Tokenizer
from torch import Tensor

from octavo.kernels.backend import AttentionBackend, GroupBatch
from octavo.kernels.choice import AttentionChoice
from octavo.runtime.models.grammar import GrammarError
from octavo.wire.steps import BlockMoves, KVGroup, SequenceDraft
from octavo.worker.models.decoder import Decoder, ModelSizes, PagedStep
from octavo.worker.runner import StepOutput
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sampling.sampler import guesses
from octavo.worker.sequences import Chooser, WorkItem
from octavo.worker.step.batch import build_batch
from octavo.worker.step.followed_slots import FollowedSlots
from octavo.worker.step.forward import Paging
from octavo.worker.step.kv_cache import KVCache, KVLayout, LayerGroup

# After so many steps in a row that ask for no guess, the draft model sleeps.
STEPS_AWAKE = 16
# Tokens of all sequences that are caught up with at once.
_MOST_CAUGHT_UP = 1024


@dataclass(frozen=True, slots=True)
class Hosted:
    """Names layers of the draft model by what they share: the KV group of the model in whose blocks they lie, and the
    `window` that they attend to (0: everything)."""

    host: int
    window: int


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Says where the draft model's layers lie: in blocks of `layout`, which have the ids of the model's, and for each
    layer with which others it is `hosted`."""

    layout: KVLayout
    hosted: list[Hosted]

    @classmethod
    def of(cls, config: ModelSizes, groups: Sequence[KVGroup], block_size: int, dtype: torch.dtype) -> "DraftLayout":
        """Deals the layers out among the KV groups that see furthest. A layer sees no more than its group does: that
        costs guesses, and no token."""
        widest = 0 if any(not group.window for group in groups) else max(group.window for group in groups)
        hosts = [index for index, group in enumerate(groups) if group.window == widest]
        hosted = [
            Hosted(hosts[layer % len(hosts)], min(filter(None, (window, widest)), default=0))
            for layer, window in enumerate(config.windows)
        ]
        layers = {host: tuple(i for i, each in enumerate(hosted) if each.host == host) for host in hosts}
        used = [LayerGroup(widest, found) for found in layers.values() if found]
        return cls(KVLayout(used, block_size, config.num_kv_heads, config.head_dim, dtype), hosted)


class DraftModelError(Exception):
    """Raised for a draft model that does not fit the model."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Holds a draft model that is loaded, before it has blocks."""

    model: Decoder
    choice: AttentionChoice
    placed: DraftLayout

    def __str__(self) -> str:
        layout, num_layers = self.placed.layout, len(self.placed.hosted)
        return f"{num_layers} layers, {layout.bytes_per_block} bytes of each block ({layout.dtype})"


def check_tokenizers(directory: Path, main: Path) -> None:
    """Checks that the models in both directories mean the same by each token id. Raises `DraftModelError` if they do
    not, or if that is not known."""
    own, other = _vocabulary(directory), _vocabulary(main)
    if own != other:
        different = len(set(own.items()) ^ set(other.items()))
        raise DraftModelError(
            f"their tokenizers differ in {different} tokens of {len(own)} and {len(other)}; give a smaller model of the"
            " same family"
        )


def _vocabulary(directory: Path) -> dict[str, int]:
    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    except Exception as error:
        raise DraftModelError(f"{directory} has no tokenizer.json that can be read: {error}") from error


class DraftModel:
    """Computes `model` over the blocks of `cache`, which lie as `placed` says, beside a model with this `paging`."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        placed: DraftLayout,
        cache: KVCache,
        paging: Paging,
        grammars: Grammars,
    ) -> None:
        self._model = model
        self._attention = attention
        self.cache = cache
        self._paging = paging
        layout = cache.layout
        self.followed = FollowedSlots(cache.num_blocks, cache.num_cpu_blocks, layout.block_size)
        self._hosts = sorted({each.host for each in placed.hosted})
        # That of all groups that the draft model lies in; 0: it sees everything.
        self._window = layout.groups[0].window
        # Steps in a row in which no guess was asked for.
        self._num_unasked = STEPS_AWAKE
        self._grammars = grammars
        self._groups = list(dict.fromkeys(placed.hosted))
        self._layers = [
            replace(layer, group=self._groups.index(hosted))
            for layer, hosted in zip(cache.layers, placed.hosted, strict=True)
        ]

    def move(self, moves: BlockMoves) -> None:
        """Moves blocks as the model's are."""
        self.cache.move(moves)
        self.followed.move(moves)

    def follow(self, items: list[WorkItem], output: StepOutput) -> StepOutput:
        """Computes the tokens of a step that the model has computed with this `output`, unless it sleeps; returns that
        with proposals for the items that want some.

        To catch up with sequences counts as the model's time; what each step takes, as that of the proposals.
        """
        began = time.monotonic_ns()
        for item in items:
            for host in self._hosts:
                self.followed.written(item.sequence.block_tables[host], item.start, item.end)
        self._num_unasked = 0 if any(item.num_proposed for item in items) else self._num_unasked + 1
        if self._num_unasked > STEPS_AWAKE:
            return output
        further = {each.sequence_id: each.token_ids for each in output.further}
        chosen = {each.sequence_id: [each.token_id, *further.get(each.sequence_id, [])] for each in output.sampled}
        asking = [item for item in items if item.num_proposed and item.sequence.sequence_id in chosen]
        self._catch_up(asking)
        items = [item for item in items if self._reached(item) == item.start]
        caught_up = time.monotonic_ns()
        found = {item.sequence.sequence_id: list(chosen[item.sequence.sequence_id]) for item in asking}
        # Where a proposal follows, what was chosen takes the place of the draft, of which it says more.
        taken = [_reaching(item, found) for item in items]
        ends = accumulate(item.num_tokens for item in taken)
        rows = [end - 1 for end, item in zip(ends, taken, strict=True) if item.sequence.sequence_id in found]
        if taken:
            self._guess(asking, self._compute(taken, rows), found)
        proposed = [
            SequenceDraft(sequence_id, tokens[len(chosen[sequence_id]) :])
            for sequence_id, tokens in found.items()
            if len(tokens) > len(chosen[sequence_id])
        ]
        times = structs.replace(
            output.times,
            model_us=output.times.model_us + (caught_up - began) // 1000,
            propose_us=(time.monotonic_ns() - caught_up) // 1000,
        )
        return replace(output, times=times, proposed=proposed)

    def _first_block(self, item: WorkItem) -> int:
        """Returns the logical block that the window of the item's first position begins in."""
        first = item.start - self._window + 1 if self._window else 0
        return max(0, first) // self._paging.block_size

    def _reached(self, item: WorkItem) -> int:
        """Returns the first of the positions that the item's first one sees which this model has not computed; that
        one itself if there is none."""
        first = self._first_block(item)
        return min(self.followed.reached(item.sequence.block_tables[host], item.start, first) for host in self._hosts)

    def _catch_up(self, items: list[WorkItem]) -> None:
        """Computes what this model has missed of the sequences before their items, as far as these see."""
        while True:
            left, missed, first_blocks = _MOST_CAUGHT_UP, list[WorkItem](), list[int]()
            for item in items:
                reached = self._reached(item)
                if count := min(left, item.start - reached):
                    missed.append(WorkItem(item.sequence, reached, count, ()))
                    first_blocks.append(self._first_block(item))
                    left -= count
            if not missed:
                return
            self._compute(missed, [], first_blocks)

    def _compute(self, items: list[WorkItem], rows: list[int], first_blocks: Sequence[int] = ()) -> Tensor:
        """Computes the tokens of `items`, as `_forward` does, which blocks say from now on."""
        hidden = self._forward(items, rows, first_blocks)
        for item in items:
            for host in self._hosts:
                self.followed.followed(item.sequence.block_tables[host], item.start, item.end)
        return hidden

    def _guess(self, asking: list[WorkItem], hidden: Tensor, found: dict[int, list[int]]) -> None:
        """Appends to what was `found` of each sequence what is guessed to follow, one after the other; `hidden` are the
        last hidden states of its last tokens."""
        left = {item.sequence.sequence_id: item.num_proposed for item in asking}
        while asking:
            choosers = [_chooser(item, found) for item in asking]
            logits = self._model.logits(hidden)
            next_tokens = guesses(logits, choosers, _masks(choosers, self._grammars))
            going: list[WorkItem] = []
            for item, token_id in zip(asking, next_tokens, strict=True):
                sequence_id = item.sequence.sequence_id
                left[sequence_id] -= 1
                if token_id is not None:
                    found[sequence_id].append(token_id)
                    if left[sequence_id]:
                        going.append(item)
            asking = going
            if asking:
                latest = [_latest(item, found) for item in asking]
                hidden = self._forward(latest, list(range(len(latest))))

    def _forward(self, items: list[WorkItem], rows: list[int], first_blocks: Sequence[int] = ()) -> Tensor:
        """Computes the tokens of `items`, which see nothing before their `first_blocks`, where some are given; returns
        the last hidden states of `rows`, [rows, hidden_size]."""
        paging = self._paging
        batch = build_batch(items, len(paging.groups), paging.block_size, paging.device)
        block_tables, context_lens = batch.block_tables, batch.context_lens
        if any(first_blocks):
            # Attention takes the first block that it is given for the beginning; positions stay what they are.
            block_tables = [_without_first(table, first_blocks) for table in block_tables]
            context_lens = [
                length - first * paging.block_size for length, first in zip(context_lens, first_blocks, strict=True)
            ]
        groups = (
            GroupBatch(
                batch.slot_mappings[hosted.host],
                block_tables[hosted.host],
                context_lens,
                batch.query_lens,
                hosted.window,
            )
            for hosted in self._groups
        )
        step = PagedStep(
            input_ids=batch.input_ids,
            positions=batch.positions,
            # Kernels want a row at least.
            rows=torch.tensor(rows or [0], dtype=torch.int64, device=paging.device),
            attention=self._attention,
            groups=[self._attention.step(group) for group in groups],
            caches=self._layers,
        )
        return self._model.forward(step)


def _without_first(tables: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns block tables without so many of the first blocks of each."""
    moved = torch.zeros_like(tables)
    for row, table, count in zip(moved, tables, counts, strict=True):
        row[: len(table) - count] = table[count:]
    return moved


def _reaching(item: WorkItem, found: dict[int, list[int]]) -> WorkItem:
    """Returns the item with the tokens that were chosen in it, if those are `found`; it still chooses nothing."""
    chosen = found.get(item.sequence.sequence_id) if item.num_proposed else None
    draft = item.draft if chosen is None else chosen
    return WorkItem(item.sequence, item.start, item.num_known + len(draft), (), draft)


def _latest(item: WorkItem, found: dict[int, list[int]]) -> WorkItem:
    """Returns an item of the last token that was found of the sequence."""
    tokens = found[item.sequence.sequence_id]
    return WorkItem(item.sequence, item.known_end + len(tokens) - 1, 1, (), tokens[-1:])


def _chooser(item: WorkItem, found: dict[int, list[int]]) -> Chooser:
    tokens = list(found[item.sequence.sequence_id])
    return Chooser(item.sequence, tokens, len(tokens))


def _masks(choosers: list[Chooser], grammars: Grammars) -> Masks:
    """Returns the masks of choosers with grammars; empty ones where nothing can follow what is guessed."""
    constrained = [each for each in choosers if each.sampling.grammar]
    if not constrained:
        return NO_MASKS
    bits = np.zeros((len(constrained), grammars.mask_bytes), dtype=np.uint8)
    for row, chooser in enumerate(constrained):
        try:
            allowed = grammars.allowed_after(chooser.sequence, chooser.drafted)
        except GrammarError:
            continue
        bits[row] = np.frombuffer(allowed, dtype=np.uint8)
    return Masks({each: row for row, each in enumerate(constrained)}, bits, {}, [])
