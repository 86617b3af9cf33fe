"""Measures K1, K2, K4 to K7, K10 to K13: attention over blocks, beside the rate of copies, other kernels, and itself on
easier ground."""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from octavo.bench.gpu import peers
from octavo.bench.gpu.balance import balance, listed
from octavo.bench.gpu.cases import CaseResult, Goal, GpuCase, NotMeasured
from octavo.bench.gpu.floors import DeviceWork, decode_attention, floor_s, prefill_attention
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.problems import (
    DTYPE,
    PagedProblem,
    check,
    each_layer,
    make_attention,
    make_step,
    ours,
    paged_problem,
)
from octavo.bench.gpu.shapes import AttentionShape
from octavo.bench.gpu.timing import Call, Contenders

OURS = "ours"
# K2 is judged by these peers; others are reported beside them.
_JUDGES = (peers.FA3, peers.FLASHINFER, peers.CUDNN, peers.VLLM)
_NEEDS = ("triton", "octavo.kernels.triton.attention")

_SHARE = Goal("share of the copy rate", "%", 80, 90, at_least=True)
_PEERS = Goal("time over the best of FA3, FlashInfer, cuDNN", "x", 1.15, 1.0)
_SPLIT = Goal("speed over one pass", "x", 4, 8, at_least=True)
_PAGING = Goal("time beyond that on contiguous keys and values", "%", 8, 3)
_GROUP = Goal("bytes per second over those of 32/8 heads", "%", 90, 97, at_least=True)
_POOL = Goal("time beyond that over a small pool", "%", 10, 3)
_LAYOUT = Goal("time over that from blocks whose layers lie apart", "x", 1.1, 1.03)
_RAGGED = Goal("share of the copy rate", "%", 70, 85, at_least=True)
_NARROW = Goal("time over that from a cache of bf16", "x", 0.65, 0.55)
_CHUNK = Goal("speed over torch's flash attention on contiguous keys and values", "x", 1.0, 1.3, at_least=True)

# Sequences and context: each at least 0.5 GB of one layer's keys and values.
_LARGE = ((64, 2048), (256, 1024), (16, 8192))
_LONG = ((1, 8192), (1, 32768), (4, 8192), (4, 32768))
# One long sequence among short ones; and bytes of pools of a real size, of which a decode reads a part.
_RAGGED_BATCHES = ((32_768, *[1024] * 15), (32_768, *[1024] * 63), (32_768, *[1024] * 255))
_SMALL_POOL, _POOLS = 4 << 30, (20 << 30, 60 << 30, 110 << 30)
# Layers of a model, and how many of them lie together (`--kv-layout`): all, some, or one.
_LAYERS, _LAYOUTS = 36, (36, 9, 1)
_HISTORIES, _CHUNK_TOKENS = (0, 6144, 14336), 2048


class _DecodeFigure(Protocol):
    def __call__(
        self, machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int
    ) -> CaseResult: ...


def cases(*, quick: bool) -> list[GpuCase]:
    """Lists the cases. `quick` makes them so small that Triton's interpreter can compute them."""
    shape = AttentionShape(8, 2, 64) if quick else AttentionShape()
    large = ((3, 40),) if quick else _LARGE
    long = ((1, 100),) if quick else _LONG
    histories, chunk = ((0, 20), 24) if quick else (_HISTORIES, _CHUNK_TOKENS)
    size = large[0]
    return [
        *(_decode_case("K1", _share, _SHARE, shape, *each) for each in large),
        *(_decode_case("K2", _beside_peers, _PEERS, shape, *each, seconds=20.0) for each in large),
        *(_decode_case("K4", _split, _SPLIT, shape, *each) for each in long),
        _decode_case("K5", _paging, _PAGING, shape, *size, seconds=6.0),
        _decode_case("K6", _group_of_seven, _GROUP, AttentionShape(28, 4, shape.head_dim), *size),
        *(_prefill_case(shape, chunk, history) for history in histories),
        _decode_case("K12", _narrow, _NARROW, shape, *size, seconds=6.0),
        *(_pool_case(shape, *size, pool, quick=quick) for pool in ((1 << 22,) if quick else _POOLS)),
        _layout_case(shape, *size, (1 << 22) if quick else _POOLS[1], quick=quick),
        *(_ragged_case(shape, contexts) for contexts in (((90, 20, 7),) if quick else _RAGGED_BATCHES)),
    ]


def _decode_case(
    goal: str,
    measure: _DecodeFigure,
    target: Goal,
    shape: AttentionShape,
    num_sequences: int,
    context: int,
    seconds: float = 3.0,
) -> GpuCase:
    return GpuCase(
        goal,
        f"B={num_sequences}, ctx {context}",
        target,
        partial(measure, shape=shape, num_sequences=num_sequences, context=context),
        (decode_attention([context] * num_sequences, shape),),
        seconds,
        modules=_NEEDS,
    )


def _decode(
    machine: GpuMachine, shape: AttentionShape, num_sequences: int, context: int, num_layers: int = 16
) -> PagedProblem:
    return paged_problem(
        shape,
        machine.device,
        num_sequences=num_sequences,
        context=context,
        num_layers=2 if machine.quick else num_layers,
    )


def _share(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    problem = _decode(machine, shape, num_sequences, context)
    result = machine.race({OURS: ours(problem)})
    sample = result.samples[OURS]
    floor = floor_s([decode_attention([context] * num_sequences, shape)], machine.rates)
    return CaseResult(100 * floor / sample.median, sample, notes={"layers": problem.num_layers})


def _beside_peers(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    problem = _decode(machine, shape, num_sequences, context, num_layers=4)
    contenders = _with_peers(problem, peers.of_decodes())
    result = machine.race(contenders)
    best = result.best(*_JUDGES)
    if best is None:
        raise NotMeasured("; ".join(f"{name}: {result.missing.get(name, 'not here')}" for name in _JUDGES))
    sample = result.samples.pop(OURS)
    notes: dict[str, float | str] = {"best": best, "not in a graph": ", ".join(result.eager)}
    return CaseResult(sample.median / result.samples[best].median, sample, result.samples, result.missing, notes)


def _with_peers(problem: PagedProblem, others: dict[str, peers.Peer]) -> Contenders:
    return {OURS: ours(problem), **{name: partial(peer, problem) for name, peer in others.items()}}


def _split(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    problem = _decode(machine, shape, num_sequences, context)
    contenders = {OURS: ours(problem), "one pass": ours(problem, splits=False)}
    samples = machine.race(contenders).samples
    split = samples.pop(OURS)
    return CaseResult(samples["one pass"].median / split.median, split, samples)


def _paging(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    """The blocks of all layers of an 8B model against a cache that has just the one layer, and blocks that are as long
    as a sequence's neighbouring tokens can be."""
    problem = _decode(machine, shape, num_sequences, context, num_layers=36)
    contenders = {
        OURS: ours(problem),
        "contiguous": _one_layer_caches(machine, shape.with_block_size(256), num_sequences, context),
        "blocks in order": _one_layer_caches(machine, shape, num_sequences, context),
    }
    samples = machine.race(contenders).samples
    paged = samples.pop(OURS)
    return CaseResult(100 * (paged.median / samples["contiguous"].median - 1), paged, samples)


def _one_layer_caches(machine: GpuMachine, shape: AttentionShape, num_sequences: int, context: int) -> list[Call]:
    return [
        call
        for _ in range(2)
        for call in ours(
            paged_problem(
                shape, machine.device, num_sequences=num_sequences, context=context, num_layers=1, shuffled=False
            )
        )
    ]


def _group_of_seven(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    """`shape` has a group of 7; as many bytes of keys and values in either."""
    plain = AttentionShape(8 * shape.kv_heads, 2 * shape.kv_heads, shape.head_dim)
    seven, eight = (decode_attention([context] * num_sequences, each).bytes for each in (shape, plain))
    contenders = {
        OURS: ours(_decode(machine, shape, num_sequences, context)),
        "32/8": ours(_decode(machine, plain, num_sequences, context)),
    }
    samples = machine.race(contenders).samples
    sample = samples.pop(OURS)
    return CaseResult(100 * (seven / sample.median) / (eight / samples["32/8"].median), sample, samples)


def _prefill_case(shape: AttentionShape, chunk: int, history: int) -> GpuCase:
    work = prefill_attention(chunk, history, shape)
    return GpuCase(
        "K7",
        f"{chunk} after {history}",
        _CHUNK,
        partial(_chunk, shape=shape, chunk=chunk, history=history, work=work),
        (work,),
        seconds=20.0,
        modules=_NEEDS,
    )


def _chunk(machine: GpuMachine, *, shape: AttentionShape, chunk: int, history: int, work: DeviceWork) -> CaseResult:
    context = history + chunk
    layers = machine.rotations(context * shape.kv_bytes_per_token)
    problem = paged_problem(
        shape, machine.device, num_sequences=1, num_queries=chunk, context=context, num_layers=layers
    )
    result = machine.race(_with_peers(problem, peers.of_chunks()))
    sample = result.samples.pop(OURS)
    if peers.FLASH not in result.samples:
        raise NotMeasured(f"no {peers.FLASH}: {result.missing[peers.FLASH]}")
    notes: dict[str, float | str] = {"TFLOP/s": work.flops / sample.median / 1e12}
    value = result.samples[peers.FLASH].median / sample.median
    return CaseResult(value, sample, result.samples, result.missing, notes)


def _narrow(machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int) -> CaseResult:
    """Measures attention over keys and values in fp8, which are half as many bytes."""
    if machine.device.type == "cuda" and torch.cuda.get_device_capability(machine.device) < (8, 9):
        raise NotMeasured("this GPU has no fp8")
    problem = _decode(machine, shape, num_sequences, context)
    narrow = replace(problem, blocks=problem.blocks.to(torch.float8_e4m3fn))
    # What fp8 holds is what counts as right.
    problem = replace(problem, blocks=narrow.blocks.to(DTYPE))
    attention, step = make_attention(shape, machine.device), make_step(problem)

    def call(layer: int) -> Call:
        query, caches = problem.queries[layer], narrow.caches(layer)
        return lambda: attention.attend(query, *caches, step, problem.scale)

    check(problem, attention.attend(problem.queries[0], *narrow.caches(0), step, problem.scale))
    samples = machine.race({OURS: each_layer(problem, call), "bf16": ours(problem)}).samples
    sample = samples.pop(OURS)
    return CaseResult(sample.median / samples["bf16"].median, sample, samples)


def _pool_case(shape: AttentionShape, num_sequences: int, context: int, pool: int, *, quick: bool) -> GpuCase:
    return GpuCase(
        "K10",
        f"B={num_sequences}, ctx {context}, pool of {pool >> 30 or pool / (1 << 30):.2g} GiB",
        _POOL,
        partial(_large_pool, shape=shape, num_sequences=num_sequences, context=context, pool=pool, quick=quick),
        (decode_attention([context] * num_sequences, shape),),
        seconds=8.0,
        modules=_NEEDS,
    )


def _large_pool(
    machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int, pool: int, quick: bool
) -> CaseResult:
    """Measures attention of one layer among 36, whose blocks lie anywhere in a pool: each read is in another page of
    the whole pool."""
    layers = 2 if quick else _LAYERS
    _check_room(machine, pool)
    times = {}
    # One after the other: both have no room.
    for name, num_bytes in ((OURS, pool), ("small pool", 1 << 20 if quick else _SMALL_POOL)):
        problem = paged_problem(
            shape,
            machine.device,
            num_sequences=num_sequences,
            context=context,
            num_layers=layers,
            pool_blocks=num_bytes // (layers * shape.block_size * shape.kv_bytes_per_token),
        )
        times[name] = machine.race({OURS: ours(problem)}).samples[OURS]
        del problem
    sample = times.pop(OURS)
    return CaseResult(100 * (sample.median / times["small pool"].median - 1), sample, times)


def _check_room(machine: GpuMachine, pool: int) -> None:
    if machine.device.type == "cuda" and (free := torch.cuda.mem_get_info(machine.device)[0]) < 1.05 * pool:
        raise NotMeasured(f"{free >> 30} GiB are free")


def _layout_case(shape: AttentionShape, num_sequences: int, context: int, pool: int, *, quick: bool) -> GpuCase:
    return GpuCase(
        "K13",
        f"B={num_sequences}, ctx {context}, pool of {pool >> 30 or pool / (1 << 30):.2g} GiB",
        _LAYOUT,
        partial(_layouts, shape=shape, num_sequences=num_sequences, context=context, pool=pool, quick=quick),
        (decode_attention([context] * num_sequences, shape),),
        seconds=16.0,
        modules=_NEEDS,
    )


def _layouts(
    machine: GpuMachine, *, shape: AttentionShape, num_sequences: int, context: int, pool: int, quick: bool
) -> CaseResult:
    """Measures attention of all layers in turns, where all lie together in a block and where fewer do: what of the pool
    a layer reads then lies closer together."""
    layers, layouts = (2, (2, 1)) if quick else (_LAYERS, _LAYOUTS)
    _check_room(machine, pool)
    num_blocks = pool // (layers * shape.block_size * shape.kv_bytes_per_token)
    times = {}
    # One after the other: two pools have no room.
    for together in layouts:
        problems = [
            paged_problem(
                shape,
                machine.device,
                num_sequences=num_sequences,
                context=context,
                num_layers=together,
                pool_blocks=num_blocks,
            )
            for _ in range(layers // together)
        ]
        calls = [call for problem in problems for call in ours(problem)]
        times[f"{together} together"] = machine.race({OURS: calls}).samples[OURS]
        del problems, calls
    sample = times.pop(f"{layers} together")
    best = min(times, key=lambda name: times[name].median)
    return CaseResult(sample.median / times[best].median, sample, times, notes={"best of those apart": best})


def _ragged_case(shape: AttentionShape, contexts: tuple[int, ...]) -> GpuCase:
    return GpuCase(
        "K11",
        f"B={len(contexts)}, ctx {contexts[0]} and {contexts[-1]}",
        _RAGGED,
        partial(_ragged, shape=shape, contexts=contexts),
        (decode_attention(contexts, shape),),
        modules=_NEEDS,
    )


def _ragged(machine: GpuMachine, *, shape: AttentionShape, contexts: tuple[int, ...]) -> CaseResult:
    """A long sequence must not hold up the others; beside it, as many tokens in sequences of one length."""
    even = sum(contexts) // len(contexts)
    problem = paged_problem(
        shape,
        machine.device,
        num_sequences=len(contexts),
        context=max(contexts),
        contexts=contexts,
        num_layers=2 if machine.quick else 16,
    )
    samples = machine.race({OURS: ours(problem), "even": ours(_decode(machine, shape, len(contexts), even))}).samples
    sample = samples.pop(OURS)
    floor = floor_s([decode_attention(contexts, shape)], machine.rates)
    predicted = balance(listed(contexts, shape.kv_heads), shape)
    notes: dict[str, float | str] = {"predicted over floor": predicted.over_floor}
    return CaseResult(100 * floor / sample.median, sample, samples, notes=notes)
