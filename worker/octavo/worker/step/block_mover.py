"""Block moves beside the model: swaps run on a stream of their own, copies on the model's.

The order of the two streams is kept apart from the copies themselves, so that tests can check it without a GPU.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from octavo.kernels import cache_ops
from octavo.kernels.checks import check_moves
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.gpu import swap as gpu_moves
from octavo.worker.gpu.swap import Pairs, Pools

# Blocks on the device, some or all of them named several times.
Blocks = Sequence[Iterable[int]]


class DeviceStream(Protocol):
    """A queue of work, carried out in the order in which it was given, beside the work of other streams."""

    def record(self) -> Any:
        """Returns an event that happens once all work given so far is done."""

    def wait(self, event: Any) -> None:
        """Makes the work given from now on wait for `event`."""

    def active(self) -> AbstractContextManager[Any]:
        """Returns a context within which work is given to this stream."""

    def passed(self, event: Any) -> bool:
        """Tells whether `event` has certainly happened."""

    def finish(self) -> None:
        """Waits until all work given so far is done."""


class CudaStream:
    """Wraps the CUDA stream that `find` returns at each call."""

    def __init__(self, find: "Callable[[], torch.cuda.Stream]") -> None:
        self._find = find

    def record(self) -> Any:
        return self._find().record_event()

    def wait(self, event: Any) -> None:
        self._find().wait_event(event)

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._find())

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def finish(self) -> None:
        self._find().synchronize()


class NullStream:
    """A stream whose work is done at once, as on a CPU."""

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """Does nothing: the event has happened."""

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def passed(self, event: Any) -> bool:
        return True

    def finish(self) -> None:
        """Does nothing: the work is done."""


@dataclass(frozen=True, slots=True)
class _SwapOut:
    """Holds the `number` of a swap-out that is under way until `done`."""

    number: int
    done: Any


@dataclass(frozen=True, slots=True)
class _Use:
    """Names blocks that the model's stream is given work on, until `done`."""

    block_ids: Blocks
    done: Any


class BlockMover:
    """Moves whole blocks within the model's pool, and between that pool and a pool in CPU memory.

    All swaps go to the stream `side`, one after the other: a block comes back as it left, and a CPU block is filled
    again only once it was read. The mover orders `side` and `main`, where the model computes, by three rules:

    * a swap begins once `main` has done its last work on the blocks that leave or are to be filled, as `used` has told;
    * after a swap-in, `main` waits for it;
    * a swap-out runs on beside the model, which may read those blocks, until `before_writing` names one of them.
    """

    def __init__(
        self,
        blocks: Pools,
        cpu_blocks: Pools,
        main: DeviceStream,
        side: DeviceStream,
        *,
        swap: Callable[[Pools, Pools, Pairs], None],
        copy: Callable[[Pools, Pairs], None],
    ) -> None:
        """Takes the pools, which hold some layers of each block, and streams; `swap(sources, targets, pairs)` and
        `copy(pools, pairs)` give work to the active stream."""
        self._blocks, self._cpu_blocks = blocks, cpu_blocks
        self._main, self._side = main, side
        self._swap, self._copy = swap, copy
        self._num_swap_outs = 0
        # For each block on the device, the last swap-out that may still read it.
        self._swap_outs: dict[int, _SwapOut] = {}
        # Work on the model's stream that may not be done, in its order.
        self._uses: deque[_Use] = deque()

    def move(self, moves: BlockMoves) -> None:
        """Swaps out, swaps in and copies, in that order: all layers and all blocks of a kind at once.

        Raises `ValueError` on a block id out of range and on a target that two moves of a kind name: then nothing
        moves.
        """
        swap_out, swap_in, copy = map(_pairs, (moves.swap_out, moves.swap_in, moves.copy))
        for blocks, cpu_blocks in zip(self._blocks, self._cpu_blocks, strict=True):
            check_moves(blocks, cpu_blocks, swap_out)
            check_moves(cpu_blocks, blocks, swap_in)
            check_moves(blocks, blocks, copy)
        self._wait_for_uses({source for source, _ in swap_out} | {target for _, target in swap_in})
        if swap_out:
            self._move_out(swap_out)
        if swap_in:
            self._move_in(swap_in)
        if copy:
            self.before_writing(target for _, target in copy)
            self._copy(self._blocks, copy)
            self.used(copy)

    def used(self, block_ids: Blocks) -> None:
        """Notes that `main` has been given work that reads or writes these blocks. The collections are kept for a
        while, and must not change."""
        while self._uses and self._main.passed(self._uses[0].done):
            self._uses.popleft()
        self._uses.append(_Use(block_ids, self._main.record()))

    def _wait_for_uses(self, block_ids: set[int]) -> None:
        """Makes `side` wait for the last work on any of `block_ids`, and so for all before."""
        for use in reversed(self._uses):
            if not block_ids.isdisjoint(chain.from_iterable(use.block_ids)):
                self._side.wait(use.done)
                return

    def before_writing(self, block_ids: Iterable[int]) -> None:
        """Makes `main` wait for the swap-outs under way that read any block of `block_ids`.

        Call it before `main` gets work that writes these blocks. Work that writes other blocks does not wait.
        """
        if not self._swap_outs:
            return
        reading = [self._swap_outs[block_id] for block_id in block_ids if block_id in self._swap_outs]
        if reading:
            self._wait_for(max(reading, key=lambda swap_out: swap_out.number))

    def before_writing_any(self) -> None:
        """Makes `main` wait for all swap-outs under way."""
        self.before_writing(list(self._swap_outs))

    def finish_swaps(self) -> None:
        """Waits until no swap is under way, so that CPU blocks may be written from outside."""
        self._side.finish()

    def _move_out(self, pairs: Pairs) -> None:
        with self._side.active():
            self._swap(self._blocks, self._cpu_blocks, pairs)
        self._num_swap_outs += 1
        swap_out = _SwapOut(self._num_swap_outs, self._side.record())
        self._swap_outs.update((source, swap_out) for source, _ in pairs)

    def _move_in(self, pairs: Pairs) -> None:
        with self._side.active():
            self._swap(self._cpu_blocks, self._blocks, pairs)
        self._main.wait(self._side.record())
        # All swap-outs so far were before it on the same stream.
        self._swap_outs.clear()

    def _wait_for(self, swap_out: _SwapOut) -> None:
        """Makes `main` wait for `swap_out`, and so for all swap-outs before it."""
        self._main.wait(swap_out.done)
        self._swap_outs = {
            block_id: later for block_id, later in self._swap_outs.items() if later.number > swap_out.number
        }


def block_mover(blocks: Pools, cpu_blocks: Pools) -> BlockMover:
    """Returns a mover for pools [num_blocks, layers, 2, ...], as many in CPU memory as on the device: that is the CPU
    too, or a GPU, to which pinned memory swaps."""
    device = blocks[0].device
    if device.type != "cuda":
        return BlockMover(blocks, cpu_blocks, NullStream(), NullStream(), swap=_swap_here, copy=_copy_here)
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    main, side = CudaStream(lambda: torch.cuda.current_stream(device)), CudaStream(lambda: own)
    swap, copy = gpu_moves.swap_blocks, gpu_moves.copy_blocks
    return BlockMover(blocks, cpu_blocks, main, side, swap=swap, copy=copy)


def _swap_here(sources: Pools, targets: Pools, pairs: Pairs) -> None:
    for source, target in zip(sources, targets, strict=True):
        cache_ops.swap_blocks(source, target, pairs)


def _copy_here(pools: Pools, pairs: Pairs) -> None:
    for pool in pools:
        cache_ops.copy_blocks(pool, pairs)


def _pairs(moves: list[BlockMove]) -> Pairs:
    return [(move.source, move.target) for move in moves]
