"""A GGUF file as a model directory: made once, told from a changed file, whole in parts, and read in shares."""

import os
import stat
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from octavo.kernels.quantized import Quantized
from octavo.runtime.models.directory import ModelDirectoryError, fingerprint, model_name, resolve_model
from octavo.testbed.models import fp32_runner, last_logits, write_tiny_model
from octavo.testing.small.gguf_model import everything, write_model
from octavo.testing.small.tiny_gguf import write_gguf
from octavo.worker.loading.gguf_weights import GGUFWeights
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DOWN = "model.layers.0.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in Q8_0, with a Q4_K weight that ranks share by columns."""
    place = tmp_path_factory.mktemp("quantised")
    model = write_tiny_model(place / "model", LlamaConfig(**CONFIG))

    def choose(name: str, shape: tuple[int, ...]) -> str:
        return "Q4_K" if "down_proj" in name else everything("Q8_0")(name, shape)

    return write_model(place / "tiny.gguf", model, "llama", choose)


def test_a_directory_is_made_once_and_named_after_the_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.chmod(0o600)
    directory = resolve_model(str(file))
    made = (directory / "config.json").stat().st_mtime_ns
    assert resolve_model(str(file)) == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    assert model_name(directory) == "tiny"
    assert (directory / "tiny.gguf").resolve() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "the file is the user's"


def test_the_same_file_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    other = tmp_path / "other" / "tiny.gguf"
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    assert resolve_model(str(other)) != resolve_model(str(file))
    assert fingerprint(resolve_model(str(other))) == fingerprint(resolve_model(str(file)))


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    before = resolve_model(str(file))
    write_gguf(file, pre="gpt-2")
    # Whoever was started before the change, and reads the weights after it.
    with pytest.raises(WeightsError, match=r"tiny\.gguf has changed since .* start all processes anew with the file"):
        open_weights(before, "auto")
    os.utime(file, ns=(1, 1))
    assert fingerprint(resolve_model(str(file))) != fingerprint(before)


@pytest.mark.parametrize("what", ["missing", "directory", "FIFO"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    with pytest.raises(ModelDirectoryError, match=r"tiny\.gguf"):
        resolve_model(str(path))


def split(file: Path, place: Path, count: int) -> list[Path]:
    """The tensors of `file` in parts, of which the first has the metadata."""
    reader = gguf.GGUFReader(str(file))
    paths = [place / f"tiny-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), "llama")
        for name, field in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_file_in_parts_is_the_same_model(quantised: Path, tmp_path: Path) -> None:
    paths = split(quantised, tmp_path, 3)
    directory = resolve_model(str(paths[0]))
    assert model_name(directory) == "tiny"
    whole, parts = (last_logits(fp32_runner(each), [3, 1, 4]) for each in (resolve_model(str(quantised)), directory))
    assert torch.equal(whole, parts)
    with pytest.raises(ModelDirectoryError, match=r"is part 2 of 3; name the first, tiny-00001-of-00003\.gguf"):
        resolve_model(str(paths[1]))
    paths[2].unlink()
    (tmp_path / "cache").rename(tmp_path / "gone")
    with pytest.raises(ModelDirectoryError, match=r"the first of 3 parts, and tiny-00003-of-00003\.gguf is not beside"):
        resolve_model(str(paths[0]))


def test_shares_are_read_by_rows_and_by_columns(quantised: Path) -> None:
    weights = GGUFWeights(quantised)
    whole = weights.take(DOWN, (256, 512))
    columns = weights.take_weight(DOWN, (256, 512), TensorPart(1, (range(256, 512),)))
    assert isinstance(columns, Quantized)
    assert torch.equal(columns.dequantize(), whole[:, 256:])
    heads = weights.take(QUERY, (256, 256), TensorPart(0, (range(128, 256),)))
    assert torch.equal(heads, weights.take(QUERY, (256, 256))[128:])


def test_a_share_that_cuts_a_block_is_refused(quantised: Path) -> None:
    with pytest.raises(WeightsError, match=r"the blocks of 256 inputs of .*, which is Q4_K in .*another --tp"):
        GGUFWeights(quantised).take(DOWN, (256, 512), TensorPart(1, (range(128),)))


def test_weights_are_checked_against_the_model(quantised: Path) -> None:
    weights = GGUFWeights(quantised)
    with pytest.raises(WeightsError, match=r"as \[256, 512\], and its metadata makes it \[256, 256\]"):
        weights.take(DOWN, (256, 256))
    with pytest.raises(WeightsError, match=r"has no tensor for 'lm_head\.bias'"):
        weights.take("lm_head.bias", (64,))
    with pytest.raises(WeightsError, match="has 12 tensors that its model has no place for"):
        weights.finish()


def test_the_log_names_quantised_weights_that_their_fused_neighbours_make_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model(tmp_path / "model", LlamaConfig(**{**CONFIG, "num_hidden_layers": 2}))
    plain = ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.gate_proj.weight")

    def choose(name: str, shape: tuple[int, ...]) -> str:
        return "F16" if name in plain else everything("Q8_0")(name, shape)

    with caplog.at_level("WARNING"):
        fp32_runner(resolve_model(str(write_model(tmp_path / "mixed.gguf", model, "llama", choose))))
        fp32_runner(resolve_model(str(write_model(tmp_path / "alike.gguf", model, "llama", everything("Q8_0")))))
    [told] = [each for each in caplog.messages if "fused" in each]
    named = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qk"] + ["model.layers.1.mlp.up_proj.weight"]
    assert told.startswith("3 quantised weights become torch.float32, because others of their fused layers are not")
    assert told.endswith(": " + ", ".join(named))
