"""Measures K8, K9, S1 and S4: writing keys and values, and moving blocks within the device and to the host and back."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.bench.gpu.cases import CaseResult, Goal, GpuCase, NotMeasured, Samples
from octavo.bench.gpu.floors import DeviceWork, block_copies, cache_write, floor_s
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.problems import DTYPE, each_layer, paged_problem
from octavo.bench.gpu.shapes import AttentionShape, DecoderShape
from octavo.bench.gpu.timing import Call, Contenders, synchronize

if TYPE_CHECKING:
    from octavo.worker.step.kv_cache import KVCache

OURS = "ours"
_WRITE = Goal("share of the copy rate", "%", 75, 88, at_least=True)
_COPY = Goal("share of the copy rate", "%", 80, 90, at_least=True)
_FUSED = Goal("speed over a copy for each block, layer, and keys or values", "x", 10, 30, at_least=True)
_SWAP = Goal("share of a contiguous pinned copy's rate", "%", 85, 95, at_least=True)

_PIECES = Goal("time over that of the fastest layout", "x", 1.1, 1.0)
# Layers that lie together (`--kv-layout`); 0: all.
_LAYOUTS = (0, 9, 1)

_PER_BLOCK, _WHOLE_BLOCKS = "a copy per block, layer, K or V", "a copy per whole block"
_COPIED_BYTES, _SWAPPED_BYTES = 256 << 20, 256 << 20


def cases(*, quick: bool) -> list[GpuCase]:
    shape = AttentionShape(8, 2, 64) if quick else AttentionShape()
    tokens, layers = (40, 2) if quick else (8192, DecoderShape.read("qwen3-8b").num_layers)
    block_bytes = layers * shape.block_size * shape.kv_bytes_per_token
    copied, swapped = (4, 4) if quick else (-(-_COPIED_BYTES // block_bytes), -(-_SWAPPED_BYTES // block_bytes))
    moves, swap = ("triton", "octavo.kernels.triton.moves"), ("msgspec",)
    return [
        GpuCase(
            "K8",
            f"{tokens} tokens",
            _WRITE,
            partial(_cache_write, shape=shape, num_tokens=tokens),
            (cache_write(tokens, shape),),
            modules=("triton", "octavo.kernels.triton.write"),
        ),
        GpuCase(
            "K9",
            f"{copied * block_bytes >> 20} MiB",
            _COPY,
            partial(_copy, shape=shape, num_layers=layers, num_blocks=copied),
            (block_copies(copied * block_bytes),),
            modules=moves,
        ),
        GpuCase(
            "K9",
            "fused or one by one",
            _FUSED,
            partial(_copy_one_by_one, shape=shape, num_layers=layers, num_blocks=copied),
            (block_copies(copied * block_bytes),),
            seconds=6.0,
            modules=moves,
        ),
        GpuCase(
            "S1",
            "out",
            _SWAP,
            partial(_swap, shape=shape, num_layers=layers, num_blocks=swapped, out=True),
            (DeviceWork(to_host=swapped * block_bytes),),
            modules=swap,
        ),
        GpuCase(
            "S1",
            "in",
            _SWAP,
            partial(_swap, shape=shape, num_layers=layers, num_blocks=swapped, out=False),
            (DeviceWork(to_device=swapped * block_bytes),),
            modules=swap,
        ),
        GpuCase(
            "S4",
            "out, layers together or apart",
            _PIECES,
            partial(_swap_layouts, shape=shape, num_layers=layers, num_blocks=swapped),
            (DeviceWork(to_host=swapped * block_bytes),),
            seconds=6.0,
            modules=swap,
        ),
    ]


def _cache_write(machine: GpuMachine, *, shape: AttentionShape, num_tokens: int) -> CaseResult:
    from octavo.kernels.triton.write import reshape_and_cache

    layers = machine.rotations(num_tokens * shape.kv_bytes_per_token)
    problem = paged_problem(shape, machine.device, num_sequences=1, context=num_tokens, num_layers=layers)
    slots = _slots(problem.tables[0], shape.block_size)[:num_tokens]
    new = torch.randn(layers, 2, num_tokens, shape.kv_heads, shape.head_dim, dtype=DTYPE, device=machine.device)

    def ours(layer: int) -> Call:
        (keys, values), (key_cache, value_cache) = new[layer], problem.caches(layer)
        return partial(reshape_and_cache, keys, values, key_cache, value_cache, slots)

    def by_index(layer: int) -> Call:
        places = (slots // shape.block_size, slots % shape.block_size)
        return lambda: [cache.index_put_(places, new[layer, i]) for i, cache in enumerate(problem.caches(layer))]

    ours(0)()
    written = problem.caches(0)[1][slots // shape.block_size, slots % shape.block_size]
    _must_equal(written, new[0, 1], "what it wrote")
    contenders = {OURS: each_layer(problem, ours), "index_put": each_layer(problem, by_index)}
    samples = machine.race(contenders).samples
    sample = samples.pop(OURS)
    return CaseResult(_share(cache_write(num_tokens, shape), sample, machine), sample, samples)


def _slots(table: Tensor, block_size: int) -> Tensor:
    """Returns the slots of the blocks in `table`, in their order."""
    offsets = torch.arange(block_size, device=table.device)
    return (table.long()[:, None] * block_size + offsets).flatten()


def _copy(machine: GpuMachine, *, shape: AttentionShape, num_layers: int, num_blocks: int) -> CaseResult:
    pool, calls = _copies(machine, shape, num_layers, num_blocks)
    sample = machine.race({OURS: calls}).samples[OURS]
    return CaseResult(_share(block_copies(_num_bytes(pool[:num_blocks])), sample, machine), sample)


def _copy_one_by_one(machine: GpuMachine, *, shape: AttentionShape, num_layers: int, num_blocks: int) -> CaseResult:
    """The copies that a cache with tensors of their own for each layer's keys and values needs, not from a graph: a
    step's copies are never the same. Beside them those of this pool's blocks, whose layers lie together."""
    pool, calls = _copies(machine, shape, num_layers, num_blocks)
    pairs = _pairs(num_blocks)

    def per_block() -> None:
        for source, target in pairs:
            for layer in range(num_layers):
                pool[target, layer, 0].copy_(pool[source, layer, 0])
                pool[target, layer, 1].copy_(pool[source, layer, 1])

    def whole_blocks() -> None:
        for source, target in pairs:
            pool[target].copy_(pool[source])

    contenders: Contenders = {OURS: calls, _PER_BLOCK: [per_block], _WHOLE_BLOCKS: [whole_blocks]}
    samples = machine.race(contenders, graphs=False).samples
    sample = samples.pop(OURS)
    return CaseResult(samples[_PER_BLOCK].median / sample.median, sample, samples)


def _copies(
    machine: GpuMachine, shape: AttentionShape, num_layers: int, num_blocks: int
) -> tuple[Tensor, Sequence[Call]]:
    """Makes a pool of 2 * `num_blocks` blocks, and a call that copies the blocks of the pool's first half to the second
    half, shuffled."""
    from octavo.kernels.triton.moves import copy_blocks

    pool = _random_pool(machine, shape, num_layers, 2 * num_blocks)
    pairs = torch.tensor(_pairs(num_blocks), dtype=torch.int32, device=machine.device)
    call = partial(copy_blocks, pool, pairs)
    call()
    sources, targets = pairs.long().unbind(1)
    _must_equal(pool[targets], pool[sources], "what it copied")
    return pool, [call]


def _pairs(num_blocks: int) -> list[tuple[int, int]]:
    targets = (num_blocks + torch.randperm(num_blocks)).tolist()
    return list(zip(torch.randperm(num_blocks).tolist(), targets, strict=True))


def _random_pool(machine: GpuMachine, shape: AttentionShape, num_layers: int, num_blocks: int) -> Tensor:
    inner = (shape.kv_heads, shape.block_size, shape.head_dim)
    return torch.empty(num_blocks, num_layers, 2, *inner, dtype=DTYPE, device=machine.device).normal_()


def _swap(machine: GpuMachine, *, shape: AttentionShape, num_layers: int, num_blocks: int, out: bool) -> CaseResult:
    """Measures moves of scattered blocks, as the worker moves them, beside one contiguous copy of as many bytes."""
    cache = make_cache(machine, shape, num_layers, num_blocks)
    moves = _moves(num_blocks, out=out)
    num_bytes = num_blocks * num_layers * shape.block_size * shape.kv_bytes_per_token
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device).random_()
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=machine.device.type == "cuda").random_()
    target, source = (on_host, on_device) if out else (on_device, on_host)
    contenders: Contenders = {
        OURS: [partial(_move_and_wait, cache, moves, machine.device)],
        "contiguous": [partial(target.copy_, source, non_blocking=True)],
    }
    samples = machine.race(contenders, graphs=False).samples
    sample = samples.pop(OURS)
    rates: dict[str, float | str] = {"GB/s": num_bytes / sample.median / 1e9}
    return CaseResult(100 * samples["contiguous"].median / sample.median, sample, samples, notes=rates)


def _swap_layouts(machine: GpuMachine, *, shape: AttentionShape, num_layers: int, num_blocks: int) -> CaseResult:
    """Measures moves of scattered blocks that are one piece each, and of some whose layers lie apart."""
    moves = _moves(num_blocks, out=True)
    caches = {
        OURS if not together else f"{together} together": make_cache(machine, shape, num_layers, num_blocks, together)
        for together in _LAYOUTS
    }
    contenders: Contenders = {
        name: [partial(_move_and_wait, cache, moves, machine.device)] for name, cache in caches.items()
    }
    samples = machine.race(contenders, graphs=False).samples
    fastest = min(sample.median for sample in samples.values())
    sample = samples.pop(OURS)
    return CaseResult(sample.median / fastest, sample, samples)


def make_cache(
    machine: GpuMachine, shape: AttentionShape, num_layers: int, num_blocks: int, layers_together: int = 0
) -> "KVCache":
    """Makes a KV cache of `num_blocks` blocks on the device and on the host each, filled with random numbers."""
    from octavo.worker.step.kv_cache import KVCache, KVLayout, LayerGroup

    groups = [LayerGroup(0, tuple(range(num_layers)))]
    layout = KVLayout(groups, shape.block_size, shape.kv_heads, shape.head_dim, DTYPE, layers_together)
    cache = KVCache(layout, num_blocks=num_blocks, num_cpu_blocks=num_blocks, device=machine.device)
    fill(cache)
    return cache


@torch.inference_mode()
def fill(cache: "KVCache") -> None:
    """Fills the cache with random numbers, never zeros, which may be faster than anything real."""
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()


def _move_and_wait(cache: "KVCache", moves: Any, device: torch.device) -> None:
    """Moves blocks and waits for the device. Moves run on a stream of their own, so that an event of the model's stream
    tells nothing about them."""
    cache.move(moves)
    synchronize(device)


def _moves(num_blocks: int, *, out: bool) -> Any:
    """Moves every block once, to a random place on the other side."""
    from octavo.wire.steps import BlockMove, BlockMoves

    sources, targets = torch.randperm(num_blocks).tolist(), torch.randperm(num_blocks).tolist()
    pairs = [BlockMove(source, target) for source, target in zip(sources, targets, strict=True)]
    return BlockMoves(swap_out=pairs) if out else BlockMoves(swap_in=pairs)


def _share(work: DeviceWork, sample: Samples, machine: GpuMachine) -> float:
    """Returns percent of the rate that the floor is made of."""
    return 100 * floor_s([work], machine.rates) / sample.median


def _must_equal(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        raise NotMeasured(f"{what} is wrong")


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
