"""Measures R1 to R5, S2, S3 and D2: decode steps, in this process and through all processes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.bench.gpu.cases import CaseResult, Goal, GpuCase, HeldModel, NotMeasured, Samples
from octavo.bench.gpu.floors import DeviceWork, decode_step, floor_s, prefill, prefill_attention
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.served.loads import equal_load
from octavo.bench.gpu.shapes import LARGE_MODELS, SMALL_MODEL, TINY_MODEL, DecoderShape

if TYPE_CHECKING:
    from octavo.bench.gpu.decoding import Decoding, LocalRunner
    from octavo.bench.gpu.served.service import Service
    from octavo.wire.steps import BlockMoves

# What a model in this process takes, and what a service takes.
LOCAL_MODULES = ("msgspec", "llguidance", "gguf", "octavo.kernels.triton.attention")
SERVICE_MODULES = (
    "msgspec",
    "llguidance",
    "gguf",
    "zmq",
    "pythonjsonlogger",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "httpx",
    "click",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "google.protobuf",
    "google.rpc",
    "tokenizers",
    "transformers",
    "jinja2",
)

_GRAPHS = Goal("speed of graphs over launches one by one", "x", 2.5, 3, at_least=True)
_SWAPPING = Goal("longer steps while blocks are swapped", "%", 10, 3)
_SWAPPING_IN = Goal("longer steps while blocks are swapped in", "%", 15, 5)
_MIXED = Goal("time over the floor", "x", 1.6, 1.3)
_EXACT = Goal("longer steps with --numerics exact", "%", 55, 30)
_IDLE_8B = Goal("time between steps in which the GPU has nothing to do", "%", 3, 1)
_IDLE_SMALL = Goal("time between steps in which the GPU has nothing to do", "%", 15, 6)


@dataclass(frozen=True)
class _Size:
    """Describes the sequences, and the room for all cases: blocks of the device and of the host."""

    model: str
    batches: tuple[int, ...]
    context: int
    num_steps: int
    num_blocks: int
    num_cpu_blocks: int
    # As long as the longest prompt: what graphs are captured for.
    max_model_len: int
    # Tokens of a prompt beside decodes, and of whole prompts.
    chunk: int
    prompts: tuple[int, ...]


_FULL = _Size(LARGE_MODELS[0], (1, 64, 256), 1024, 64, 18_000, 1024, 36_864, 512, (1024, 8192, 32_768))
_QUICK = _Size(TINY_MODEL, (1, 4), 40, 4, 96, 32, 2048, 16, (24, 60))
_MIXED_STEPS, _STEP_TOKENS = 32, 8192
# Prompt tokens a second of an 8B model, by the length of a prompt.
_PREFILL_TARGETS = {1024: (35_000, 43_000), 8192: (28_000, 34_000), 32_768: (16_000, 20_000)}
# Times over the floor, by batch size.
_STEP_TARGETS = {1: (1.25, 1.12), 64: (1.35, 1.20), 256: (1.40, 1.25)}


def cases(large: str, *, quick: bool) -> list[GpuCase]:
    size = _QUICK if quick else replace(_FULL, model=large)
    model = DecoderShape.read(size.model)
    middle = min(size.batches[-1], 64)
    graphs = min(size.batches[-1], 16)
    held = HeldModel(f"runner {size.model}", 90.0)
    return [
        *(
            GpuCase(
                "R1",
                f"{size.model}, B={batch}, ctx {size.context}",
                Goal("time over the floor", "x", *_STEP_TARGETS.get(batch, (1.35, 1.2))),
                partial(_step, size=size, held=held, batch=batch),
                decode_step([size.context] * batch, model),
                seconds=8.0,
                held=held,
                modules=LOCAL_MODULES,
            )
            for batch in size.batches
        ),
        GpuCase(
            "R2",
            f"{size.model}, B={graphs}",
            _GRAPHS,
            partial(_graph_or_eager, size=size, held=held, batch=graphs),
            decode_step([size.context] * graphs, model),
            # The second runner is started by the case itself.
            seconds=10.0 + held.start_s,
            held=held,
            modules=LOCAL_MODULES,
        ),
        *(_prefill_case(size, model, held, length) for length in size.prompts),
        GpuCase(
            "R4",
            f"{size.model}, B={middle}, {size.chunk} of a prompt",
            _MIXED,
            partial(_mixed, size=size, held=held, batch=middle),
            _mixed_floor(size, model, middle),
            seconds=8.0,
            held=held,
            modules=LOCAL_MODULES,
        ),
        # The large model last: what comes next wants it too.
        _idle_case("R3", TINY_MODEL if quick else SMALL_MODEL, _IDLE_SMALL, middle, quick=quick),
        _idle_case("R3", size.model, _IDLE_8B, middle, quick=quick),
        GpuCase(
            "S2",
            f"{size.model}, B={middle}",
            _SWAPPING,
            partial(_while_swapping, size=size, held=held, batch=middle, out=True),
            decode_step([size.context] * middle, model),
            seconds=8.0,
            held=held,
            modules=LOCAL_MODULES,
        ),
        GpuCase(
            "S3",
            f"{size.model}, B={middle}",
            _SWAPPING_IN,
            partial(_while_swapping, size=size, held=held, batch=middle, out=False),
            decode_step([size.context] * middle, model),
            seconds=8.0,
            held=held,
            modules=LOCAL_MODULES,
        ),
        GpuCase(
            "D2",
            f"{size.model}, B={middle}, up to {size.max_model_len}",
            _EXACT,
            partial(_exact_step, size=size, held=held, batch=middle),
            decode_step([size.context] * middle, model),
            # The exact runner is started by the case itself.
            seconds=10.0 + held.start_s,
            held=held,
            modules=LOCAL_MODULES,
        ),
    ]


def _prefill_case(size: _Size, model: DecoderShape, held: HeldModel, length: int) -> GpuCase:
    count = max(1, _STEP_TOKENS // length) if size is not _QUICK else 2
    return GpuCase(
        "R5",
        f"{size.model}, {count} x {length}",
        Goal("prompt tokens", "tok/s", *_PREFILL_TARGETS.get(length, (1, 1)), at_least=True),
        partial(_prefill, size=size, held=held, length=length, count=count),
        prefill([length] * count, model),
        seconds=12.0,
        held=held,
        modules=LOCAL_MODULES,
    )


def service_held(model: str) -> HeldModel:
    """Names the service that cases through all processes share."""
    return HeldModel(f"service {model}", 40.0 if model == SMALL_MODEL else 100.0)


def hold_service(machine: GpuMachine, model: str) -> "Service":
    """Returns all processes with `model`, warm."""
    from octavo.bench.gpu.served.service import Service

    return machine.hold(service_held(model), lambda: Service.start(machine, model))


def _local(
    machine: GpuMachine, size: _Size, held: HeldModel, *, cuda_graphs: bool = True, exact: bool = False
) -> "LocalRunner":
    from octavo.bench.gpu.decoding import LocalRunner

    def make() -> LocalRunner:
        return LocalRunner(
            machine,
            size.model,
            num_blocks=size.num_blocks,
            num_cpu_blocks=size.num_cpu_blocks,
            max_model_len=size.max_model_len,
            numerics="exact" if exact else "default",
            cuda_graphs=cuda_graphs,
        )

    return machine.hold(held, make)


def _decoding(local: "LocalRunner", size: _Size, batch: int) -> "Decoding":
    from octavo.bench.gpu.decoding import Decoding

    return Decoding(local, batch, size.context, size.num_steps)


def _step(machine: GpuMachine, *, size: _Size, held: HeldModel, batch: int) -> CaseResult:
    local = _local(machine, size, held)
    sample = _step_sample(local, size, batch)
    floor = floor_s(decode_step([size.context] * batch, local.model), machine.rates)
    return CaseResult(sample.median / floor, sample, notes={"kernels": local.runner.kernels})


def _step_sample(local: "LocalRunner", size: _Size, batch: int) -> Samples:
    """Lets go of the runner, as whoever closes it expects."""
    with _decoding(local, size, batch) as decoding:
        return Samples.of(decoding.step_times())


def _graph_or_eager(machine: GpuMachine, *, size: _Size, held: HeldModel, batch: int) -> CaseResult:
    """Measures one after the other: two such models would not leave each other room for blocks."""
    samples = dict[str, Samples]()
    eager = HeldModel(f"{held.name}, eager", held.start_s)
    for name, graphs in (("graph", True), ("eager", False)):
        local = _local(machine, size, held if graphs else eager, cuda_graphs=graphs)
        samples[name] = _step_sample(local, size, batch)
    graph = samples.pop("graph")
    return CaseResult(samples["eager"].median / graph.median, graph, samples)


def _prefill(machine: GpuMachine, *, size: _Size, held: HeldModel, length: int, count: int) -> CaseResult:
    from octavo.bench.gpu.decoding import prefill_s

    local = _local(machine, size, held)
    prefill_s(local, length, count, _STEP_TOKENS)
    sample = Samples.of([prefill_s(local, length, count, _STEP_TOKENS) for _ in range(3)])
    return CaseResult(length * count / sample.median, sample)


def _mixed(machine: GpuMachine, *, size: _Size, held: HeldModel, batch: int) -> CaseResult:
    """Steps that decode and compute a part of a long prompt."""
    from octavo.bench.gpu.decoding import Decoding

    local = _local(machine, size, held)
    num_steps = min(size.num_steps, _MIXED_STEPS)
    with Decoding(local, batch, size.context, num_steps, chunk=size.chunk) as decoding:
        sample = Samples.of(decoding.step_times())
    floor = floor_s(_mixed_floor(size, local.model, batch), machine.rates)
    return CaseResult(sample.median / floor, sample)


def _mixed_floor(size: _Size, model: DecoderShape, batch: int) -> list[DeviceWork]:
    """Half of the prompt is computed before."""
    dense, cached = decode_step([size.context] * batch, model)
    history = size.chunk * min(size.num_steps, _MIXED_STEPS) // 2
    one_layer = prefill_attention(size.chunk, history, model.attention)
    return [
        DeviceWork(bytes=dense.bytes, flops=dense.flops + 2 * model.layer_weights * size.chunk),
        cached,
        DeviceWork(bytes=one_layer.bytes * model.num_layers, flops=one_layer.flops * model.num_layers),
    ]


def _exact_step(machine: GpuMachine, *, size: _Size, held: HeldModel, batch: int) -> CaseResult:
    """Both captured for contexts much longer than those that there are."""
    plain = _step_sample(_local(machine, size, held), size, batch)
    exact = _step_sample(_local(machine, size, HeldModel(f"{held.name}, exact", held.start_s), exact=True), size, batch)
    return CaseResult(100 * (exact.median / plain.median - 1), exact, {"default": plain})


def _while_swapping(machine: GpuMachine, *, size: _Size, held: HeldModel, batch: int, out: bool) -> CaseResult:
    """Measures in turns with steps that swap nothing."""
    local = _local(machine, size, held)
    quiet, swapping = list[float](), list[float]()
    with _decoding(local, size, batch) as decoding:
        quiet += decoding.step_times()
        idle = decoding.idle_blocks
    step_s = Samples.of(quiet).median
    rate = machine.rates.to_host_bytes_per_s if out else machine.rates.to_device_bytes_per_s
    link_blocks = int(0.8 * step_s * rate / local.model.kv_bytes_per_block)
    num_blocks = max(1, min(link_blocks, len(idle), local.runner.num_cpu_blocks))
    for _ in range(2):
        with _decoding(local, size, batch) as decoding:
            swapping += decoding.step_times(_swap(idle[:num_blocks], out=out))
        with _decoding(local, size, batch) as decoding:
            quiet += decoding.step_times()
    sample, alone = Samples.of(swapping), Samples.of(quiet)
    moved = num_blocks * local.model.kv_bytes_per_block / sample.median
    notes: dict[str, float | str] = {"blocks in each step": num_blocks, "GB/s": moved / 1e9}
    return CaseResult(100 * (sample.median / alone.median - 1), sample, {"without": alone}, notes=notes)


def _swap(block_ids: list[int], *, out: bool) -> "BlockMoves":
    from octavo.wire.steps import BlockMove, BlockMoves

    if out:
        return BlockMoves(swap_out=[BlockMove(block, place) for place, block in enumerate(block_ids)])
    return BlockMoves(swap_in=[BlockMove(place, block) for place, block in enumerate(block_ids)])


def _idle_case(goal: str, model: str, target: Goal, batch: int, *, quick: bool) -> GpuCase:
    prompt, output = (40, 40) if quick else (768, 512)
    return GpuCase(
        goal,
        f"{model}, B={batch}",
        target,
        partial(_idle, model=model, batch=batch, lengths=(prompt, output)),
        decode_step([prompt + output // 2] * batch, DecoderShape.read(model)),
        seconds=15.0,
        held=service_held(model),
        modules=SERVICE_MODULES,
    )


def _idle(machine: GpuMachine, *, model: str, batch: int, lengths: tuple[int, int]) -> CaseResult:
    """Measures the share of the time in which all sequences decode that no event of the worker on the GPU covers."""
    window = hold_service(machine, model).decode_window(equal_load(batch, *lengths, key="idle"))
    if not window.steps:
        raise NotMeasured("no step was done between the first tokens and the last ones")
    wall_us = 1e6 * window.wall_s
    step_s = window.wall_s / window.steps
    notes: dict[str, float | str] = {
        "steps": window.steps,
        "model, us a step": window.model_us / window.steps,
        "prepare, us of the host a step": window.prepare_us / window.steps,
        "sample, us a step": window.sample_us / window.steps,
        "beyond the model, %": 100 * (1 - window.model_us / wall_us),
    }
    return CaseResult(100 * (1 - window.busy_us / wall_us), Samples(step_s, step_s, step_s, 1), notes=notes)
