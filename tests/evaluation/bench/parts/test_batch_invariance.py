"""Counting the tokens that depend on company, on a tiny model."""

from pathlib import Path

from click.testing import CliRunner
from transformers import LlamaConfig

from octavo.bench.parts.batch_invariance import COMPANIES, differing, main
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.native import loaded, threads


def test_tokens_that_differ_are_counted_with_their_sequences() -> None:
    assert differing([[1, 2, 3], [4, 5, 6], [7]], [[1, 2, 3], [4, 6, 5], [8]]) == (3, 2)


def test_every_company_is_reported_for_every_dtype(tmp_path: Path) -> None:
    loaded()
    write_byte_model(tmp_path)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    write_tiny_model(tmp_path, config)
    with threads(1):
        result = CliRunner().invoke(main, ["--model", str(tmp_path), "--prompts", "3", "--step", "30", "--tokens", "4"])
    assert result.exit_code == 0, result.output
    for dtype in ("bfloat16", "float32"):
        assert f"{dtype}, native" in result.output
    for name in COMPANIES:
        assert result.output.count(f"  {name}  ") == 2
    assert result.output.count("     0  in 0 of 3 sequences") == 2 * len(COMPANIES)
