"""The tokenizer inside a GGUF file, as transformers' tokenizer.json and tokenizer_config.json."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.worker.gguf_model import GGUFModel, UnknownGGUFError

_CONTROL_TOKEN = 3


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """The byte-level BPE of `model`. Raises `UnknownGGUFError` for tokenizers of another kind."""
    kind = model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre", "default")
    if kind != ("gpt2", "smollm"):
        raise UnknownGGUFError(f"{model.path} has a tokenizer of kind {kind[0]!r} with pre-tokenizer {kind[1]!r}")
    if model.value("tokenizer.ggml.add_bos_token", False):
        raise UnknownGGUFError(f"{model.path} wants BOS before every text")
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in model.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What `smollm` stands for: each digit alone, and so the space before digits too.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in _control_ids(model)])
    return tokenizer


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    """tokenizer_config.json of `model`, with its chat template."""
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    special = {name.removesuffix("_id"): tokens[i] for name, i in model.special_token_ids().items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "unk_token": tokens[model.value("tokenizer.ggml.unknown_token_id")],
        "model_max_length": int(model.config()["max_position_embeddings"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": model.value("tokenizer.chat_template"),
    }


def _control_ids(model: GGUFModel) -> list[int]:
    return [i for i, kind in enumerate(model.value("tokenizer.ggml.token_type")) if kind == _CONTROL_TOKEN]
