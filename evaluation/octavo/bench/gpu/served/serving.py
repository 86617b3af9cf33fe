"""Measures E1, E2, E3 and the price of D1: whole loads through all processes."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo.bench.gpu.cases import CaseResult, Goal, GpuCase, HeldModel, Samples
from octavo.bench.gpu.floors import serving
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.served.loads import RequestBatch, equal_load, mixed_load, write_model
from octavo.bench.gpu.shapes import SMALL_MODEL, TINY_MODEL, DecoderShape
from octavo.bench.gpu.steps import SERVICE_MODULES, hold_service, service_held

_WALL = Goal("time of all requests", "s", 36.9, 30.9)
_SMALL = Goal("output tokens", "tok/s", 14_500, 21_800, at_least=True)
_LARGE = Goal("output tokens", "tok/s", 7_600, 9_500, at_least=True)
_TRANSFORMERS = Goal("speed over transformers' generate_batch", "x", 3, 8, at_least=True)
_EXACT = Goal("longer with --numerics exact", "%", 55, 30)
GENERATE_BATCH = "generate_batch"


def cases(large: str, *, quick: bool) -> list[GpuCase]:
    large, small = (TINY_MODEL, TINY_MODEL) if quick else (large, SMALL_MODEL)
    long = equal_load(4, 40, 8, "E1") if quick else equal_load(256, 1024, 1024, "E1")
    mixed = mixed_load(4, 4, 20) if quick else mixed_load()
    short = equal_load(4, 40, 4, "D1") if quick else equal_load(256, 1024, 256, "D1")
    return [
        _load_case("E1", large, long, _WALL, seconds=45.0),
        _load_case("E2", small, mixed, _SMALL, seconds=15.0),
        _load_case("E2", small, mixed, _SMALL, seconds=20.0, streamed=True),
        GpuCase(
            "E3",
            f"{small}, {mixed.title}",
            _TRANSFORMERS,
            partial(_beside_transformers, model=small, load=mixed),
            serving(mixed.lengths, DecoderShape.read(small)),
            seconds=150.0,
            held=service_held(small),
            modules=SERVICE_MODULES,
        ),
        _load_case("E2", large, mixed, _LARGE, seconds=25.0),
        GpuCase(
            "D1",
            f"time, {large}, {short.title}",
            _EXACT,
            partial(_exact_time, model=large, load=short),
            serving(short.lengths, DecoderShape.read(large)),
            # The exact service is started by the case itself.
            seconds=60.0 + service_held(large).start_s,
            held=service_held(large),
            modules=SERVICE_MODULES,
        ),
    ]


def _load_case(
    goal: str, model: str, load: RequestBatch, target: Goal, *, seconds: float, streamed: bool = False
) -> GpuCase:
    return GpuCase(
        goal,
        f"{model}, {load.title}{', streamed' if streamed else ''}",
        target,
        partial(_serve, model=model, load=load, streamed=streamed, rate=target.at_least),
        serving(load.lengths, DecoderShape.read(model)),
        seconds,
        service_held(model),
        SERVICE_MODULES,
    )


def _serve(machine: GpuMachine, *, model: str, load: RequestBatch, streamed: bool, rate: bool) -> CaseResult:
    """Serves whole answers, as whoever has a batch asks for them, or tokens as they come."""
    served = hold_service(machine, model).run(load, streamed=streamed)
    notes: dict[str, float | str] = {"output tokens/s": served.tokens_per_s}
    if streamed:
        notes["first token, s"] = served.first_token_s
    return CaseResult(served.tokens_per_s if rate else served.wall_s, _once(served.wall_s), notes=notes)


def _beside_transformers(machine: GpuMachine, *, model: str, load: RequestBatch) -> CaseResult:
    """Measures one after the other: both take all of the GPU's memory."""
    from octavo.bench.gpu.served.transformers_peer import generate_batch

    ours = hold_service(machine, model).run(load)
    machine.release()
    with TemporaryDirectory(prefix="octavo-") as directory:
        theirs = generate_batch(write_model(model, Path(directory)), machine, load)
    peers = {GENERATE_BATCH: _once(theirs.wall_s)}
    return CaseResult(theirs.wall_s / ours.wall_s, _once(ours.wall_s), peers, notes={"attention": theirs.attention})


def _exact_time(machine: GpuMachine, *, model: str, load: RequestBatch) -> CaseResult:
    """Measures a shorter load than E1's: its outputs are a quarter as long."""
    from octavo.bench.gpu.served.service import Service

    plain = hold_service(machine, model).run(load)
    held = HeldModel(f"{service_held(model).name}, exact", service_held(model).start_s)
    exact = machine.hold(held, lambda: Service.start(machine, model, OCTAVO_NUMERICS="exact")).run(load)
    peers = {"default": _once(plain.wall_s)}
    return CaseResult(100 * (exact.wall_s / plain.wall_s - 1), _once(exact.wall_s), peers)


def _once(seconds: float) -> Samples:
    return Samples(seconds, seconds, seconds, 1)
