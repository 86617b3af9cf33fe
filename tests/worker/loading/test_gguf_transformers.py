"""GGUF files that our own reader does not know, through transformers: the same logits, or one clear error."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from octavo.runtime.models.gguf.file import GGUFError
from octavo.testbed.models import write_tiny_model
from octavo.worker.loading.prepare import convert_with_transformers, prepare_directory

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<|end|>", "a", "b", "ab", "c", "Ġ", "d", "e", "de"]
KV_HEADS = 2
CONFIG = Qwen2Config(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    tie_word_embeddings=False,
)


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def write_gguf(path: Path, weights: Path, architecture: str = "qwen2") -> Path:
    """The tensors in `weights` as a GGUF file in fp32, with a small tokenizer."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    # No way of cutting words that is known here: so another reads the file.
    writer.add_tokenizer_pre("unheard-of")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b", "d e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in load_file(weights).items():
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Qwen2 in bfloat16, and the same as `tiny.gguf` beside it."""
    directory = tmp_path_factory.mktemp("qwen2")
    write_tiny_model(directory, CONFIG).bfloat16().save_pretrained(directory)
    write_gguf(directory / "tiny.gguf", directory / "model.safetensors")
    return directory


def test_what_is_not_known_here_gives_the_same_logits(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    prepare_directory(source / "tiny.gguf", tmp_path / "new")
    token_ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.inference_mode():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(directory, dtype="float32")(token_ids).logits
            for directory in (source, tmp_path / "new")
        )
    torch.testing.assert_close(found, expected)


def test_what_is_written_can_be_served(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    prepare_directory(source / "tiny.gguf", tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["Qwen2ForCausalLM"], len(TOKENS))
    assert "quantization_config" not in config
    assert {tensor.dtype for tensor in load_file(tmp_path / "new" / "model.safetensors").values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.encode("ab c") == [3, 5, 4]
    assert tokenizer.decode([3, 5, 4]) == "ab c"


def test_what_transformers_cannot_read_either_is_one_line(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    unknown = write_gguf(tmp_path / "unknown.gguf", source / "model.safetensors", architecture="abacus")
    with pytest.raises(
        GGUFError, match=r"unknown\.gguf can be read neither here nor by transformers: .*abacus"
    ) as caught:
        prepare_directory(unknown, tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_what_transformers_needs_for_it_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        convert_with_transformers(source / "tiny.gguf", tmp_path / "new")
    assert caught.value.name == "accelerate"
