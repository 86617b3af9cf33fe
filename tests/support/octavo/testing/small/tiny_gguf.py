"""Makes a GGUF file small enough for any test."""

from pathlib import Path

import gguf
import numpy as np


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm", extra: str = "") -> Path:
    """A one-layer Llama with four tokens; projections count upwards, so that their order can be checked."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (8, 8))
    for name, shape in {**shapes, "attn_norm": (8,), "ffn_norm": (8,)}.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    if extra:
        writer.add_tensor(extra, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
