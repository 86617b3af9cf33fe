"""Measures the worker alone, as a child (`octavo.bench.child`): `python -m octavo.bench.alone MODEL SETTINGS THREADS`,
where SETTINGS are fields of `ModelSettings` as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.child import Answer, serve
from octavo.bench.figures import StepRows
from octavo.bench.in_process import InProcess, ObservedRunner
from octavo.bench.measurement import peak_memory
from octavo.bench.workloads import KV_CACHE_MEMORY, Case, decoding
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.decoder import Decoder
from octavo.worker.step.model_runner import ModelRunner

_NUM_SEQUENCES, _NUM_STEPS = 64, 16


def profile_decode(engine: InProcess, runner: ObservedRunner, decoder: Decoder | None) -> dict[str, float]:
    """Milliseconds of a step of 64 sequences, by stage; where the layers of `decoder` are compiled, the model's by
    operation, and what is left of it as that of embeddings, last norm and LM head."""
    case = decoding(_NUM_SEQUENCES, 2 * _NUM_SEQUENCES, runner.model.vocab_size)
    _prefill(engine, runner, case)
    began = time.perf_counter()
    op_s, stage_s = _observe(engine, decoder)
    wall = time.perf_counter() - began
    engine.advance()
    if op_s:
        op_s["embeddings, last norm, LM head"] = stage_s.pop("model") - sum(op_s.values())
    seconds = {**op_s, **stage_s}
    seconds["other"] = wall - sum(seconds.values())
    return {name: 1000 * value / _NUM_STEPS for name, value in seconds.items()}


def _prefill(engine: InProcess, runner: ObservedRunner, case: Case) -> None:
    """Runs until all sequences decode. Raises `RuntimeError` if they never do so together."""
    runner.take_steps()
    engine.submit(case)
    while runner.steps[-1:] != [StepRows(len(case.jobs), len(case.jobs))]:
        engine.advance(1)
        if engine.is_idle:
            raise RuntimeError(
                f"{len(case.jobs)} sequences never decoded together, so there is no step to profile: their keys and"
                f" values do not fit into {runner.num_blocks} blocks; profile a smaller model"
            )


def _observe(engine: InProcess, decoder: Decoder | None) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of `_NUM_STEPS` decode steps by kind of operation and by stage. Only a compiled decoder
    counts its operations."""
    if not isinstance(decoder, CompiledLlama):
        return {}, engine.advance(_NUM_STEPS)
    decoder.op_times.clear()
    decoder.profiling = True
    stage_s = engine.advance(_NUM_STEPS)
    decoder.profiling = False
    return {name: nanoseconds / 1e9 for name, nanoseconds in decoder.op_times.items()}, stage_s


def _answers(model: Path, settings: dict[str, str], threads: int) -> dict[str, Answer]:
    given: dict[str, Any] = {"threads": threads, "kv_cache_memory": KV_CACHE_MEMORY, **settings}
    runner = ModelRunner(model, ModelSettings(**given))
    observed = ObservedRunner(runner)
    engine = InProcess(observed)

    def memory(_: None) -> dict[str, int]:
        return {"peak": peak_memory(os.getpid()), "kv": observed.kv_bytes}

    return {
        "about": lambda _: (
            f"computes in {runner.model.dtype}, {runner.kv_bytes_per_token} KV bytes per token; {runner.kernels}"
        ),
        "run": lambda case: engine.run(Case.from_json(case)).to_json(),
        "memory": memory,
        "profile": lambda _: profile_decode(engine, observed, runner.decoder),
    }


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))))
