"""Runs transformers' continuous batching, in a process of its own."""

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.bench.child import Answer, MeasuredChild, serve
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.served.loads import RequestBatch

# The kind that runs wherever torch does; transformers takes a faster one by itself where that is installed.
_ATTENTION = "paged|sdpa"


@dataclass(frozen=True)
class Generated:
    """Holds the wall time of a load, and the attention that computed it."""

    wall_s: float
    attention: str


def generate_batch(directory: Path, machine: GpuMachine, load: RequestBatch) -> Generated:
    """Raises `ChildError` if it fails, or is not done in the time that is left."""
    command: list[str | Path] = [sys.executable, "-m", __name__, directory, machine.device.type]
    paths = os.pathsep.join(filter(None, sys.path))
    child = MeasuredChild(command, directory / "transformers.log", PYTHONPATH=paths)
    try:
        seconds = max(1, int(machine.budget.left()))
        jobs = [asdict(job) for job in load.jobs]
        child.ask("run", {"jobs": jobs[:4], "seconds": seconds})
        return Generated(**child.ask("run", {"jobs": jobs, "seconds": seconds}))
    finally:
        child.close()


def _answers(directory: Path, device: str) -> dict[str, Answer]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16).eval()
    model.set_attn_implementation(_ATTENTION)

    def run(question: dict[str, Any]) -> dict[str, object]:
        # Ends this process: nothing else stops a batch that hangs.
        signal.alarm(question["seconds"])
        generated = _generate(model, question["jobs"])
        signal.alarm(0)
        return asdict(generated)

    return {"run": run}


def _generate(model: Any, jobs: list[dict[str, Any]]) -> Generated:
    """Timed from the first request to the last result; as `generate_batch` does it, but each of its own length."""
    from transformers import GenerationConfig

    configure: Any = GenerationConfig
    settings = configure(do_sample=False, eos_token_id=-1, max_new_tokens=max(job["num_tokens"] for job in jobs))
    with model.continuous_batching_context_manager(generation_config=settings, block=True, timeout=5) as manager:
        began = time.perf_counter()
        for job in jobs:
            manager.add_request(job["prompt_token_ids"], max_new_tokens=job["num_tokens"])
        wanted = left = len(jobs)
        num_tokens = 0
        while left:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"it stopped with {left} of {wanted} requests left")
            if result is not None and result.is_finished():
                num_tokens += len(result.generated_tokens)
                left -= 1
        generated = Generated(time.perf_counter() - began, str(model.config._attn_implementation))
    asked = sum(job["num_tokens"] for job in jobs)
    if num_tokens != asked:
        raise RuntimeError(f"{num_tokens} tokens came where {asked} were asked for")
    return generated


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2])))
