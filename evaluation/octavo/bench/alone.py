"""The worker alone, in a process of its own: `python -m octavo.bench.alone MODEL DTYPE THREADS` is a child
(`octavo.bench.child`)."""

import os
import sys
from pathlib import Path

from octavo.bench.child import Answer, serve
from octavo.bench.decode_profile import profile_decode
from octavo.bench.in_process import InProcess
from octavo.bench.parts.observed import ObservedRunner
from octavo.bench.whole.processes import peak_memory
from octavo.bench.workloads import KV_CACHE_MEMORY, Case
from octavo.worker.step.model_runner import ModelRunner


def _answers(model: Path, dtype: str, threads: int) -> dict[str, Answer]:
    runner = ModelRunner(model, dtype=dtype, threads=threads, kv_cache_memory=KV_CACHE_MEMORY)
    observed = ObservedRunner(runner)
    engine = InProcess(observed)

    def memory(_: None) -> dict[str, int]:
        return {"peak": peak_memory(os.getpid()), "kv": observed.kv_bytes}

    return {
        "run": lambda case: engine.run(Case.from_json(case)).to_json(),
        "memory": memory,
        "profile": lambda _: profile_decode(engine, observed, runner.decoder),
    }


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
