"""Runs OpenVINO GenAI on the same weights, as a child (`octavo.bench.child`): `PYTHON openvino_peer.py MODEL FORMAT
THREADS` in the environment that `make bench-peers` makes. FORMAT is bf16, f32, or what weights are compressed to: int8
or int4.

The model is converted once, and kept in that environment. One continuous-batching pipeline serves all cases, as one
server would, prefix caching on. Keys and values are of the FORMAT (f32 on a CPU without bf16), or where weights are
compressed what OpenVINO makes them then: u8.
"""

import os
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
from octavo.bench.peer_models import kept
from octavo.bench.workloads import KV_CACHE_MEMORY, Case, CaseRequest

# 256 was no faster, 1,024 a little slower.
_MAX_NUM_BATCHED_TOKENS = 512
# The arguments of optimum-intel's OVWeightQuantizationConfig, none for weights as they are. Embedding and LM head stay
# in 8 bits.
_COMPRESSION: dict[str, dict[str, Any]] = {
    "bf16": {},
    "f32": {},
    "int8": {"bits": 8, "sym": False},
    "int4": {"bits": 4, "group_size": 64, "sym": False, "ratio": 1.0},
}


def converted(model: Path, kind: str) -> Path:
    """Returns a directory with `model` as OpenVINO's IR, weights of `kind`, and its tokenizer."""
    name = "openvino-" + (kind if _COMPRESSION[kind] else "plain")
    return kept(model, name, lambda to: _convert(model, kind, to))


def _convert(model: Path, kind: str, to: Path) -> None:
    # These take seconds to import, and only this once.
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    compression = (
        {"quantization_config": OVWeightQuantizationConfig(**_COMPRESSION[kind])} if _COMPRESSION[kind] else {}
    )
    # Not compiled, for it is not run; 8 bits would be the default for large models.
    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, **(compression or {"load_in_8bit": False})
    )
    exported.save_pretrained(to)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    openvino.save_model(tokenizer, to / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, to / "openvino_detokenizer.xml")


def _computed(kind: str) -> str:
    """Returns what weights of `kind` are computed in: OpenVINO refuses keys and values in bf16 on a CPU that
    has no instructions for it."""
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "f32" if kind == "bf16" and "BF16" not in capabilities else kind


class OpenVinoPeer:
    """Drives one pipeline step by step in this process: no server is around it, as with the worker alone."""

    def __init__(self, model: Path, kind: str, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = KV_CACHE_MEMORY >> 30
        scheduling.max_num_batched_tokens = _MAX_NUM_BATCHED_TOKENS
        scheduling.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        defaults = "; its defaults else: keys and values u8, activations quantised by groups of 32"
        if not _COMPRESSION[kind]:
            computed = _computed(kind)
            properties |= {"INFERENCE_PRECISION_HINT": computed, "KV_CACHE_PRECISION": computed}
            defaults = "" if computed == kind else f"; this CPU has no {kind}, so that OpenVINO computes in {computed}"
        said = {"weights": _COMPRESSION[kind] or kind, **properties}
        self.about = (
            f"version {openvino_genai.__version__}, continuous batching of at most {_MAX_NUM_BATCHED_TOKENS} tokens,"
            f" prefix caching on, {', '.join(f'{name} {value}' for name, value in said.items())}{defaults}"
        )
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            converted(model, kind), scheduling, "CPU", properties
        )

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


def _answers(model: Path, kind: str, threads: int) -> dict[str, Answer]:
    peer = OpenVinoPeer(model, kind, threads)
    return {
        "about": lambda _: peer.about,
        "run": lambda case: peer.run(Case.from_json(case)).to_json(),
        "memory": lambda _: {"peak": peak_memory(os.getpid())},
        "profile": lambda _: {},
    }


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
