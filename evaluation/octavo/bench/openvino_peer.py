"""Runs OpenVINO GenAI on the same weights, as a child (`octavo.bench.child`): `PYTHON openvino_peer.py MODEL DTYPE
THREADS` in the environment that `make bench-peers` makes.

The model is converted once, its weights uncompressed as they are, and kept in that environment. One continuous-batching
pipeline serves all cases, as one server would: prefix caching on, activations, keys and values in DTYPE.
"""

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

# The environment of `make bench-peers` has no Octavo.
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import openvino
import openvino_genai

from octavo.bench.child import Answer, serve
from octavo.bench.measurement import CpuMeter, Measurement, TokenTimes, measured, peak_memory
from octavo.bench.workloads import KV_CACHE_MEMORY, Case, CaseRequest

_HINTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# 256 was no faster, 1,024 a little slower.
_MAX_NUM_BATCHED_TOKENS = 512


def converted(model: Path) -> Path:
    """Returns a directory with `model` as OpenVINO's IR and its tokenizer, converted where it is not there yet."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for weights in sorted(model.glob("*.safetensors")):
        digest.update(f"{weights.resolve()} {weights.stat().st_size} {weights.stat().st_mtime_ns}".encode())
    directory = Path(sys.prefix) / "octavo-models" / digest.hexdigest()[:16]
    if not directory.is_dir():
        _convert(model, directory)
    return directory


def _convert(model: Path, directory: Path) -> None:
    # These take seconds to import, and only this once.
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    parts = directory.with_suffix(".partial")
    shutil.rmtree(parts, ignore_errors=True)
    # Not compiled, for it is not run; 8 bits would be the default for large models.
    exported = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
    exported.save_pretrained(parts)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    openvino.save_model(tokenizer, parts / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, parts / "openvino_detokenizer.xml")
    parts.rename(directory)


class OpenVinoPeer:
    """Drives one pipeline step by step in this process: no server is around it, as with the worker alone."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = KV_CACHE_MEMORY >> 30
        scheduling.max_num_batched_tokens = _MAX_NUM_BATCHED_TOKENS
        scheduling.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "KV_CACHE_PRECISION": _HINTS[dtype],
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(converted(model), scheduling, "CPU", properties)

    def run(self, case: Case) -> Measurement:
        """Submits all of the case's requests at once, and serves them."""
        meter = CpuMeter({"worker": os.getpid()})
        began, steps = time.perf_counter(), 0
        streams = [TokenTimes() for _ in case.jobs]
        handles = [self._submit(index, job) for index, job in enumerate(case.jobs)]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            steps += 1
            for stream, handle in zip(streams, handles, strict=True):
                while handle.can_read():
                    num_tokens = sum(len(output.generated_ids) for output in handle.read().values())
                    stream.arrived(num_tokens, time.perf_counter() - began)
        return measured(case, time.perf_counter() - began, streams, steps, cpu_s=meter.cpu_s())

    def _submit(self, index: int, job: CaseRequest) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.num_tokens
        config.ignore_eos = True
        config.num_return_sequences = job.num_sequences
        config.do_sample = job.temperature > 0
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = job.temperature, sys.maxsize, 1.0
        prompt = openvino.Tensor(np.array([job.prompt_token_ids], dtype=np.int64))
        return self._pipeline.add_request(index, prompt, config)


def _answers(model: Path, dtype: str, threads: int) -> dict[str, Answer]:
    peer = OpenVinoPeer(model, dtype, threads)
    return {
        "run": lambda case: peer.run(Case.from_json(case)).to_json(),
        "memory": lambda _: {"peak": peak_memory(os.getpid())},
        "profile": lambda _: {},
    }


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
