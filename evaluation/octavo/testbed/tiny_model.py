"""Makes model directories small enough for any test: configuration and a byte-level tokenizer, without torch."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
# Byte tokens come first, so token ids 0 to 255 are not the bytes themselves but their places in the sorted alphabet.
START_TOKEN_ID = 256
END_TOKEN_ID = 257
VOCAB_SIZE = 258

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_model(
    directory: Path, max_model_len: int = 2048, *, template: str = CHAT_TEMPLATE, markers: Sequence[str] = ()
) -> None:
    """Writes a model directory without weights: a small Llama's config.json, generation_config.json, and a tokenizer
    with one token per byte, no merges and two special tokens.

    The tokenizer also has a token for each of `markers`, of which those in brackets and bars are special.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(max_model_len, VOCAB_SIZE + len(markers)))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": START_TOKEN_ID, "eos_token_id": END_TOKEN_ID, "do_sample": False},
    )
    _byte_tokenizer(markers).save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START_TOKEN,
            "eos_token": END_TOKEN,
            "pad_token": END_TOKEN,
            "model_max_length": max_model_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )


def _config(max_model_len: int, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": START_TOKEN_ID,
        "eos_token_id": END_TOKEN_ID,
        "torch_dtype": "float32",
    }


def _byte_tokenizer(markers: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(START_TOKEN, special=True), AddedToken(END_TOKEN, special=True)])
    for marker in markers:
        tokenizer.add_tokens([AddedToken(marker, special=marker[0] == "[" or "|" in marker)])
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
