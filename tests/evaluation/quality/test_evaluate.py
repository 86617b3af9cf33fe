"""`octavo evaluate` on a tiny model, beside what transformers computes of the same text."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from octavo.quality.cli import evaluate
from octavo.quality.text import ALICE, TextError, windows
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import START_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.native import loaded

WINDOW, WINDOWS = 40, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Llama with random weights and a tokenizer of bytes; its directory, and the model as transformers computes
    it."""
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return directory, write_tiny_model(directory, config)


def run(directory: Path, *arguments: str) -> Result:
    options = ["--model", str(directory), "--threads", "1", "--num-blocks", "16"]
    options += ["--window", str(WINDOW), "--windows", str(WINDOWS)]
    return CliRunner().invoke(evaluate, [*options, *arguments])


def figures(directory: Path, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The qualities of the model and its references, as written to a file."""
    path = tmp_path / "figures.json"
    result = run(directory, "--json", str(path), *arguments)
    assert result.exit_code == 0, result.output
    return list(json.loads(path.read_bytes()).values())


@torch.inference_mode()
def transformers_loss(model: Any, directory: Path) -> float:
    """The mean loss of the second half of each window."""
    losses = []
    for window in windows(ALICE, directory, WINDOW, WINDOWS):
        logits = model(torch.tensor([window])).logits[0]
        half = slice(WINDOW // 2, WINDOW - 1)
        losses.append(torch.nn.functional.cross_entropy(logits[half], torch.tensor(window[WINDOW // 2 + 1 :])))
    return float(torch.stack(losses).mean())


def test_the_perplexity_is_what_transformers_computes(model: tuple[Path, Any], tmp_path: Path) -> None:
    directory, reference = model
    found, own = figures(directory, tmp_path, "--dtype", "float32")
    assert math.log(found["perplexity"]["mean"]) == pytest.approx(transformers_loss(reference, directory), rel=1e-4)
    # The same computation twice.
    assert own["perplexity"] == found["perplexity"]
    (distance,) = found["distances"]
    assert distance["largest"] == 0
    assert distance["same_top"] == {"mean": 1, "error": 0}


def test_what_a_dtype_loses_shows(model: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = model
    found, _ = figures(directory, tmp_path, "--dtype", "bfloat16")
    (distance,) = found["distances"]
    assert 0 < distance["divergence"]["mean"] < distance["largest"] < 1


def test_an_original_stands_beside_the_models_own_weights(model: tuple[Path, Any], tmp_path: Path) -> None:
    directory, reference = model
    other = tmp_path / "other"
    write_byte_model(other)
    with torch.no_grad():
        reference.model.embed_tokens.weight.mul_(0.5)
        reference.save_pretrained(other)
        reference.model.embed_tokens.weight.mul_(2)
    found, own, original = figures(directory, tmp_path, "--dtype", "float32", "--original", str(other))
    beside_own, beside_original = found["distances"]
    assert beside_own["largest"] == 0 < beside_original["divergence"]["mean"]
    assert original["perplexity"]["mean"] != own["perplexity"]["mean"]


def test_quantised_weights_stand_beside_themselves_as_numbers_and_beside_what_they_were(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    loaded()
    found, own, before = figures(model[0], tmp_path, "--quantization", "q4_0")
    beside_own, beside_before = found["distances"]
    assert 0 <= beside_own["divergence"]["mean"] < beside_before["divergence"]["mean"]
    assert own["perplexity"]["mean"] != before["perplexity"]["mean"]
    exact, _ = figures(model[0], tmp_path, "--dtype", "float32")
    # References have keys and values in fp32, where a quantised model has bf16.
    assert before["perplexity"] == exact["perplexity"]
    output = run(model[0], "--quantization", "q4_0").output
    assert f"{model[0].name} (q4_0, float32, bfloat16 KV)" in output


def test_the_table_names_the_text_the_model_and_its_references(model: tuple[Path, Any]) -> None:
    directory, _ = model
    output = run(directory, "--dtype", "float32").output
    assert f"alice.txt: {WINDOWS} windows of {WINDOW} tokens" in output
    assert f"{directory.name} (float32, float32 KV)" in output
    assert "  beside its own weights, fp32 " in output
    assert "100.00 ± 0.00 %" in output


def test_windows_lie_side_by_side_and_the_rest_is_dropped(model: tuple[Path, Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij", encoding="utf-8")
    first, second = windows(text, model[0], 4, None)
    assert len({*first, *second}) == 8
    assert windows(text, model[0], 4, 1) == [first]


def test_each_window_begins_as_texts_begin_for_the_tokenizer(model: tuple[Path, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    directory, text = tmp_path / "model", tmp_path / "text.txt"
    write_byte_model(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    begin = "<|im_start|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, START_TOKEN_ID)]
    )
    tokenizer.save(path)
    text.write_text("abcdefghij", encoding="utf-8")
    a, b, c, d, e, f, *_ = windows(text, model[0], 10, None)[0]
    # It stands before the text, and in the place of what would begin another window.
    assert windows(text, directory, 4, None) == [[START_TOKEN_ID, a, b, c], [START_TOKEN_ID, e, f, f + 1]]
    assert d == c + 1


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"too short", "has 9 tokens and a window 40"), (b"\xff", "as UTF-8 text")]
)
def test_a_text_that_will_not_do_is_refused(
    content: bytes, complaint: str, model: tuple[Path, Any], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    with pytest.raises(TextError, match=complaint):
        windows(text, model[0], WINDOW, None)
    result = run(model[0], "--text", str(text))
    assert result.exit_code == 1
    assert complaint in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--device", "fake"), "computes on a CPU, in one process"),
        (("--tp", "2"), "computes on a CPU, in one process"),
        (("--max-model-len", "16"), "longer than --max-model-len allows"),
        (("--window", "4096"), "4096"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: tuple[str, ...], complaint: str, model: tuple[Path, Any]
) -> None:
    result = run(model[0], *arguments)
    assert result.exit_code != 0
    assert complaint in result.output
