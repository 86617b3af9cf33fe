"""Tensor parallel in one process: every rank is a thread, and what the ranks exchange lies in shared memory.

One thread runs at a time, until it waits for the others: not all that models are made of bears two threads.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.kernels.backend import AttentionBackend, CacheShape
from octavo.kernels.choice import choose_attention
from octavo.testbed.models import GREEDY, next_item
from octavo.wire.steps import KVGroup
from octavo.worker.models.compiled import compiled
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.registry import load_model
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.batch import build_batch
from octavo.worker.step.forward import PagedModel, Paging
from octavo.worker.step.kv_cache import KVCache, KVLayout
from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.links import add_in_order

T = TypeVar("T")

_BLOCK_SIZE = 16
# A rank that waits longer waits for one that will not come.
_PATIENCE_S = 60.0


class _Meeting:
    """Lets `size` ranks bring something each, and see what all have brought."""

    def __init__(self, size: int) -> None:
        self._brought: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.turn = threading.Lock()

    def bring(self, rank: int, mine: Any, use: Callable[[list[Any]], T]) -> T:
        """Returns the result of `use` on what all ranks brought, in their order. Nobody leaves before all have called
        it."""
        self._brought[rank] = mine
        self._wait()
        used = use(self._brought)
        self._wait()
        return used

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()

    def abandon(self) -> None:
        """One rank will not come: no other shall wait for it."""
        self._barrier.abort()


class ThreadGroup(ShardGroup):
    """The group as one of its ranks sees it. `num_reduces`: how many sums it has been in."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self._rank, self._size, self._meeting = rank, size, meeting
        self.num_reduces = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous(), "a real group sends memory without gaps"
        self.num_reduces += 1
        if self.size == 1:
            return tensor
        total = self._meeting.bring(self.rank, tensor, _sum)
        return tensor.copy_(total)

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        assert part.shape[1:] == (sizes[self.rank],)
        whole = self._meeting.bring(self.rank, part, lambda parts: torch.cat(parts, dim=1))
        return whole if self.rank == 0 else None

    def exchange(self, number: int) -> list[int]:
        return self._meeting.bring(self.rank, number, list)

    def agree(self, chosen: list[int]) -> list[int]:
        """Returns what rank 0 has `chosen`."""
        return self._meeting.bring(self.rank, chosen, lambda every: list(every[0]))


def _sum(tensors: list[Tensor]) -> Tensor:
    return add_in_order(torch.stack(tensors), torch.empty_like(tensors[0]))


def lone_rank(rank: int, size: int) -> ThreadGroup:
    """One of `size` ranks without the others, for what waits for none."""
    return ThreadGroup(rank, size, _Meeting(size))


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Runs `work` on each of `size` ranks, and returns all results. Raises what a rank raises."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        # Both are a thread's own.
        torch.set_num_threads(1)
        with meeting.turn, torch.inference_mode():
            try:
                return work(ThreadGroup(rank, size, meeting))
            except BaseException:
                meeting.abandon()
                raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for each in runs if (error := each.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in runs]


class RankRunner:
    """One rank's share of the model in `directory` with its cache, on the CPU; it computes the steps that all ranks
    are given. `kept`, if given, is the cache's dtype; `make_attention`, if given, makes what computes attention, and
    `make_paged` what computes steps; `options` are those of `load_model`."""

    def __init__(
        self,
        directory: Path,
        group: ThreadGroup,
        *,
        dtype: torch.dtype = torch.float32,
        kept: torch.dtype | None = None,
        num_blocks: int = 64,
        make_attention: Callable[[CacheShape, torch.device], AttentionBackend] | None = None,
        make_paged: Callable[[Decoder, KVCache, Paging], PagedModel] = PagedModel,
        **options: Any,
    ) -> None:
        device = torch.device("cpu")
        self.group = group
        self.model = load_model(directory, dtype=dtype, device=device, group=group, **options)
        layout = KVLayout.of(self.model.config, _BLOCK_SIZE, kept or dtype)
        make_attention = make_attention or (lambda shape, device: choose_attention(shape, device, dtype).attention)
        self.attention = make_attention(layout.cache_shape, device)
        self.decoder = compiled(self.model, self.attention)
        self._groups = [KVGroup(each.window) for each in layout.groups]
        paging = Paging(self.attention, self._groups, _BLOCK_SIZE, self.decoder.config.max_model_len, device)
        cache = KVCache(layout, num_blocks=num_blocks, num_cpu_blocks=0, device=device)
        self.paged = make_paged(self.decoder, cache, paging)

    def sequences(self, prompts: Sequence[Sequence[int]], room: int) -> list[WorkerSequence]:
        """Makes sequences of `prompts` with blocks for `room` more tokens each."""
        found, free = [], 0
        for index, prompt in enumerate(prompts):
            width = -(-(len(prompt) + room) // _BLOCK_SIZE)
            tables = [list(range(free + width * at, free + width * (at + 1))) for at in range(len(self._groups))]
            free += width * len(self._groups)
            found.append(WorkerSequence(index, 0, GREEDY, len(prompt), list(prompt), 0, tables))
        return found

    def logits(self, sequences: list[WorkerSequence], counts: Sequence[int]) -> Tensor:
        """Computes one step of `counts` more tokens of each sequence. Returns the logits after them, [sequences,
        vocab_size], on rank 0."""
        items = [next_item(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed += count
        batch = build_batch(items, len(self._groups), _BLOCK_SIZE, self.paged.device)
        hidden = self.paged.forward(batch, self.paged.step(batch))
        # The next call may write to the same memory.
        return self.paged.logits(hidden).clone()

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Computes the logits after each of `prompts`, [prompts, vocab_size] on rank 0, all in one step."""
        return self.logits(self.sequences(prompts, 0), [len(prompt) for prompt in prompts])

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Generates `num_tokens` greedy ids per prompt, all prompts together; every rank returns those of rank 0."""
        sequences = self.sequences(prompts, num_tokens)
        for _ in range(num_tokens):
            left = [len(sequence.token_ids) - sequence.num_computed for sequence in sequences]
            chosen = self.group.agree(self.logits(sequences, left).argmax(dim=1).tolist())
            for sequence, token_id in zip(sequences, chosen, strict=True):
                sequence.token_ids.append(token_id)
        return [sequence.token_ids[sequence.prompt_length :] for sequence in sequences]
