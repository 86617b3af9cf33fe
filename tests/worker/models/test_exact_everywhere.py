"""With `--numerics exact` a quantised model says the same on every instruction set, Octavo's and torch's.

This file is also what the processes run that choose another one.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.models.test_quantized_layers import CONFIGS, quantized_layers

from octavo.kernels.native.library import VARIANT_VARIABLE
from octavo.testbed.models import finish, generate, last_logits, new_sequences, run_step, write_tiny_model
from octavo.testing.depth import deep
from octavo.testing.native import VARIANTS, loaded
from octavo.wire.sampling import SamplingParams
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.step.model_runner import ModelRunner

# What torch may use of a CPU, by Octavo's own variant.
TORCH = dict.fromkeys(("amx", "avx512_bf16", "avx512_vnni", "avx512"), "avx512") | {"avx_vnni": "avx2", "avx2": "avx2"}
CACHES = ("int8", "bfloat16", "float32")
# All of the vocabulary; what its largest tokens settle; what they do not.
SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=64, logprobs=3),
    SamplingParams(temperature=1.7, seed=2, max_tokens=64, logprobs=3, top_p=0.4),
    SamplingParams(temperature=3.0, seed=3, max_tokens=64, logprobs=3, top_p=0.97),
    SamplingParams(temperature=0.8, seed=4, max_tokens=64, logprobs=3, top_k=150, min_p=0.01),
]
PROMPTS = [random.Random(row).choices(range(300), k=length) for row, length in enumerate((1, 8, 90, 33))]


def said(directory: Path, kv_cache_dtype: str) -> dict[str, Any]:
    """Greedy tokens of prompts together, in chunks, and one by one; sampled tokens with their logprobs, by each way of
    choosing; the bits of the logits after each prompt."""
    settings = ModelSettings(
        dtype="float32", numerics="exact", kv_cache_dtype=kv_cache_dtype, num_blocks=64, num_cpu_blocks=0, threads=1
    )
    with quantized_layers(numbers=False):
        runner = ModelRunner(directory, settings)
    assert isinstance(runner.decoder, CompiledLlama)
    sequences = new_sequences(runner, PROMPTS[:2], 12)
    run_step(runner, sequences, 2048)
    return {
        "together": generate(runner, PROMPTS, 12),
        "in chunks": generate(runner, PROMPTS, 12, budget=7),
        "alone": [generate(runner, [prompt], 12)[0] for prompt in PROMPTS],
        "some later": finish(runner, sequences, 12),
        "sampled": [sampled_by(runner, sampling) for sampling in SAMPLINGS],
        "logits": [last_logits(runner, prompt).view(torch.int32).tolist() for prompt in PROMPTS],
    }


def sampled_by(runner: ModelRunner, sampling: SamplingParams) -> list[Any]:
    """Tokens that are drawn, and the bits of the logprobs of the first and of the prompts."""
    sequences = new_sequences(runner, PROMPTS, 40, sampling)
    [*chosen] = run_step(runner, sequences, 2048).sampled
    logprobs = [[each.token_id, each.logprobs.logprob.hex()] for each in chosen if each.logprobs]
    assert len(logprobs) == len(PROMPTS)
    return [logprobs, finish(runner, sequences, 40)]


def said_on(variant: str, directory: Path) -> dict[str, Any]:
    """What `said` gives in a process of its own, by type of the cache."""
    capability = TORCH.get(variant, "default")
    environment = {
        **os.environ,
        VARIANT_VARIABLE: variant,
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", __name__, str(directory)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert answer.pop("ran on") == [variant, capability.upper()]
    return answer


@pytest.mark.parametrize("model", ["biases", *deep("four norms, GELU")])
@pytest.mark.parametrize("variant", [*deep(*VARIANTS[:-1]), "portable"])
def test_tokens_and_logits_are_the_same(variant: str, model: str, tmp_path: Path) -> None:
    """The second model bounds its logits."""
    library = loaded()
    if library.functions.octavo_choose(variant.encode()) is None:
        pytest.skip(f"this CPU does not run {variant}")
    library.functions.octavo_choose(library.variant.encode())
    write_tiny_model(tmp_path, CONFIGS[model])
    found = said_on(variant, tmp_path)
    for kv_cache_dtype in CACHES:
        expected = said(tmp_path, kv_cache_dtype)
        assert found[kv_cache_dtype] == expected, kv_cache_dtype
        assert expected["together"] == expected["in chunks"] == expected["alone"]


def main(directory: Path) -> None:
    """Prints what `said` gives for each type of the cache, and what it ran on."""
    answers: dict[str, Any] = {name: said(directory, name) for name in CACHES}
    print(json.dumps({**answers, "ran on": [loaded().variant, torch.backends.cpu.get_cpu_capability()]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
