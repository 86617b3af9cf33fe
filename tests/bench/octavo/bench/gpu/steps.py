"""R1, R2, R3 and S2: decode steps, in this process and through all of them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.bench.gpu.cases import Case, Held, Measured, NotMeasured, Target
from octavo.bench.gpu.floors import decode_step, floor_s
from octavo.bench.gpu.loads import equal_load
from octavo.bench.gpu.machine import Machine
from octavo.bench.gpu.samples import Sample
from octavo.bench.gpu.shapes import LARGE_MODELS, SMALL_MODEL, TINY_MODEL, ModelShape

if TYPE_CHECKING:
    from octavo.bench.gpu.decoding import Decoding, LocalRunner
    from octavo.bench.gpu.service import Service
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

_GRAPHS = Target("speed of graphs over launches one by one", "x", 2.5, 3, at_least=True)
_SWAPPING = Target("longer steps while blocks are swapped", "%", 10, 3)
_IDLE_8B = Target("time between steps in which the GPU has nothing to do", "%", 3, 1)
_IDLE_SMALL = Target("time between steps in which the GPU has nothing to do", "%", 15, 6)


@dataclass(frozen=True)
class _Size:
    """Sequences, and the room for all cases: blocks of the device and of the host."""

    model: str
    batches: tuple[int, ...]
    context: int
    num_steps: int
    num_blocks: int
    num_cpu_blocks: int


_FULL = _Size(LARGE_MODELS[0], (1, 64, 256), 1024, 64, 18_000, 1024)
_QUICK = _Size(TINY_MODEL, (1, 4), 40, 4, 64, 32)
# Times over the floor, by batch size.
_STEP_TARGETS = {1: (1.25, 1.12), 64: (1.35, 1.20), 256: (1.40, 1.25)}


def cases(large: str, *, quick: bool) -> list[Case]:
    size = _QUICK if quick else replace(_FULL, model=large)
    model = ModelShape.read(size.model)
    middle = min(size.batches[-1], 64)
    graphs = min(size.batches[-1], 16)
    held = Held(f"runner {size.model}", 90.0)
    return [
        *(
            Case(
                "R1",
                f"{size.model}, B={batch}, ctx {size.context}",
                Target("time over the floor", "x", *_STEP_TARGETS.get(batch, (1.35, 1.2))),
                partial(_step, size=size, held=held, batch=batch),
                decode_step([size.context] * batch, model),
                seconds=8.0,
                held=held,
                modules=LOCAL_MODULES,
            )
            for batch in size.batches
        ),
        Case(
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
        # The large model last: what comes next wants it too.
        _idle_case("R3", TINY_MODEL if quick else SMALL_MODEL, _IDLE_SMALL, middle, quick=quick),
        _idle_case("R3", size.model, _IDLE_8B, middle, quick=quick),
        Case(
            "S2",
            f"{size.model}, B={middle}",
            _SWAPPING,
            partial(_while_swapping, size=size, held=held, batch=middle),
            decode_step([size.context] * middle, model),
            seconds=8.0,
            held=held,
            modules=LOCAL_MODULES,
        ),
    ]


def service_held(model: str) -> Held:
    """What cases through all processes share."""
    return Held(f"service {model}", 40.0 if model == SMALL_MODEL else 100.0)


def hold_service(machine: Machine, model: str) -> "Service":
    """All processes with `model`, warm."""
    from octavo.bench.gpu.service import Service

    return machine.hold(service_held(model), lambda: Service.start(machine, model))


def _local(machine: Machine, size: _Size, held: Held, *, cuda_graphs: bool = True) -> "LocalRunner":
    from octavo.bench.gpu.decoding import LocalRunner
    from octavo.worker.gpu.options import GpuOptions

    def make() -> LocalRunner:
        return LocalRunner(
            machine,
            size.model,
            num_blocks=size.num_blocks,
            num_cpu_blocks=size.num_cpu_blocks,
            max_model_len=2048,
            gpu=GpuOptions(cuda_graphs=cuda_graphs),
        )

    return machine.hold(held, make)


def _decoding(local: "LocalRunner", size: _Size, batch: int) -> "Decoding":
    from octavo.bench.gpu.decoding import Decoding

    return Decoding(local, batch, size.context, size.num_steps)


def _step(machine: Machine, *, size: _Size, held: Held, batch: int) -> Measured:
    local = _local(machine, size, held)
    sample = _step_sample(local, size, batch)
    floor = floor_s(decode_step([size.context] * batch, local.model), machine.rates)
    return Measured(sample.median / floor, sample, notes={"kernels": local.runner.kernels})


def _step_sample(local: "LocalRunner", size: _Size, batch: int) -> Sample:
    """Lets go of the runner, as whoever closes it expects."""
    with _decoding(local, size, batch) as decoding:
        return Sample.of(decoding.step_times())


def _graph_or_eager(machine: Machine, *, size: _Size, held: Held, batch: int) -> Measured:
    """One after the other: two such models would not leave each other room for blocks."""
    samples = dict[str, Sample]()
    eager = Held(f"{held.name}, eager", held.start_s)
    for name, graphs in (("graph", True), ("eager", False)):
        local = _local(machine, size, held if graphs else eager, cuda_graphs=graphs)
        samples[name] = _step_sample(local, size, batch)
    graph = samples.pop("graph")
    return Measured(samples["eager"].median / graph.median, graph, samples)


def _while_swapping(machine: Machine, *, size: _Size, held: Held, batch: int) -> Measured:
    """In turns with steps that swap nothing. Each step swaps out as many blocks as the link takes in four fifths of a
    step, so that it always has something to do and never falls behind."""
    local = _local(machine, size, held)
    quiet, swapping = list[float](), list[float]()
    with _decoding(local, size, batch) as decoding:
        quiet += decoding.step_times()
        idle = decoding.idle_blocks
    step_s = Sample.of(quiet).median
    link_blocks = int(0.8 * step_s * machine.rates.to_host_bytes_per_s / local.model.kv_bytes_per_block)
    num_blocks = max(1, min(link_blocks, len(idle), local.runner.num_cpu_blocks))
    for _ in range(2):
        with _decoding(local, size, batch) as decoding:
            swapping += decoding.step_times(_swap_out(idle[:num_blocks]))
        with _decoding(local, size, batch) as decoding:
            quiet += decoding.step_times()
    sample, alone = Sample.of(swapping), Sample.of(quiet)
    moved = num_blocks * local.model.kv_bytes_per_block / sample.median
    notes: dict[str, float | str] = {"blocks in each step": num_blocks, "GB/s": moved / 1e9}
    return Measured(100 * (sample.median / alone.median - 1), sample, {"without": alone}, notes=notes)


def _swap_out(block_ids: list[int]) -> "BlockMoves":
    from octavo.wire.steps import BlockMove, BlockMoves

    return BlockMoves(swap_out=[BlockMove(block, target) for target, block in enumerate(block_ids)])


def _idle_case(goal: str, model: str, target: Target, batch: int, *, quick: bool) -> Case:
    prompt, output = (40, 40) if quick else (768, 512)
    return Case(
        goal,
        f"{model}, B={batch}",
        target,
        partial(_idle, model=model, batch=batch, lengths=(prompt, output)),
        decode_step([prompt + output // 2] * batch, ModelShape.read(model)),
        seconds=15.0,
        held=service_held(model),
        modules=SERVICE_MODULES,
    )


def _idle(machine: Machine, *, model: str, batch: int, lengths: tuple[int, int]) -> Measured:
    """What the worker's own events on the GPU leave of the time in which all sequences decode."""
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
    return Measured(100 * (1 - window.busy_us / wall_us), Sample(step_s, step_s, step_s, 1), notes=notes)
