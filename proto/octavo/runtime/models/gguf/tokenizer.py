"""The tokenizer of a GGUF file as transformers has it, in its JSON files."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from octavo.runtime.models.gguf.file import GGUFError, UnsupportedGGUF
from octavo.runtime.models.gguf.metadata import Metadata
from octavo.runtime.models.gguf.pre_tokenizers import PRE_TOKENIZERS

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Texts of tokens that end an answer, whatever the file says of them, as llama.cpp has it.
_ENDS: Final = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    )
)
# Keys of tokens that end an answer.
_END_KEYS = ("eos", "eot", "eom")
_WORD_START = "▁"


class GGUFTokenizer:
    """Describes the tokenizer in `metadata`. Raises `GGUFError` for one that is missing, broken or unknown."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._kind = metadata.text("tokenizer.ggml.model")
        if self._kind not in ("gpt2", "llama"):
            raise UnsupportedGGUF(
                f"{metadata.path} has a tokenizer of kind {self._kind!r}; gpt2 (byte-level BPE) and llama"
                " (SentencePiece BPE) are served: serve the model's directory of safetensors instead"
            )
        tokens = metadata.texts("tokenizer.ggml.tokens")
        self._tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            twice = next(token for token_id, token in enumerate(self._tokens) if self._ids[token] != token_id)
            raise self._broken(f"has the token {twice!r} twice")
        self._types = (
            [int(kind) for kind in metadata.numbers("tokenizer.ggml.token_type", len(tokens))]
            if metadata.has("tokenizer.ggml.token_type")
            else [1] * len(tokens)
        )

    def tokenizer_json(self) -> dict[str, Any]:
        parts = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            **parts,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        named = {f"{name}_token": self._id(name) for name in ("bos", "eos", "unknown", "padding")}
        named = {"unk_token": named.pop("unknown_token"), "pad_token": named.pop("padding_token"), **named}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._tokens[token_id] for name, token_id in named.items() if token_id is not None},
            "model_max_length": self._metadata.count("{arch}.context_length"),
            "clean_up_tokenization_spaces": False,
            **self._templates(),
        }

    def generation_config(self) -> dict[str, Any]:
        """Returns the ids that begin and end texts. Those that end one are collected as llama.cpp collects them."""
        named = [token_id for name in _END_KEYS if (token_id := self._id(name)) is not None]
        texts = [self._ids[text] for text in _ENDS if text in self._ids]
        ends = list(dict.fromkeys([*named, *sorted(texts)]))
        if not ends:
            raise self._broken("names no token that ends a text (tokenizer.ggml.eos_token_id)")
        ids = {"bos_token_id": self._id("bos"), "eos_token_id": ends, "pad_token_id": self._id("padding")}
        return {name: found for name, found in ids.items() if found is not None}

    def _templates(self) -> dict[str, Any]:
        """Returns the chat templates, if there are any: one text, or several with their names."""
        key = "tokenizer.chat_template"
        if not self._metadata.has(key):
            return {}
        default = self._metadata.text(key)
        if not self._metadata.has("tokenizer.chat_templates"):
            return {"chat_template": default}
        named = [
            {"name": name, "template": self._metadata.text(f"{key}.{name}")}
            for name in self._metadata.texts("tokenizer.chat_templates")
            if name != "default"
        ]
        return {"chat_template": [{"name": "default", "template": default}, *named]}

    def _id(self, name: str) -> int | None:
        """Returns the id of the token that the file calls `name`; None if it names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if not self._metadata.has(key):
            return None
        token_id = self._metadata.count(key, least=0)
        if token_id >= len(self._tokens):
            raise self._broken(f"names token {token_id} as {name}, and has {len(self._tokens)} tokens")
        return token_id

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yields the tokens that are found in a text before it is cut into words."""
        ends = {token_id for name in _END_KEYS if (token_id := self._id(name)) is not None}
        # The texts of Phi-3 lose the space behind their special tokens, which the file does not say.
        stripped = any(name in self._metadata.text("general.name", "").lower() for name in ("phi-3", "phi3"))
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            special = kind in (_UNKNOWN, _CONTROL) or token_id in ends or (token in _ENDS and kind != _USER_DEFINED)
            if not special and kind != _USER_DEFINED:
                continue
            yield {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": stripped and special and token not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": special,
            }

    def _byte_level(self) -> dict[str, Any]:
        name = self._metadata.text("tokenizer.ggml.pre", "default")
        pre_tokenizer = PRE_TOKENIZERS.get(name)
        if pre_tokenizer is None:
            raise UnsupportedGGUF(
                f"{self._metadata.path} cuts texts into words as {name!r} does, which is not known here"
                f" ({', '.join(sorted(PRE_TOKENIZERS))} are): convert the model again with a newer llama.cpp, or serve"
                " its directory of safetensors"
            )
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre_tokenizer.steps(), byte_level]},
            "post_processor": self._ends_added(default=pre_tokenizer.adds_bos),
            "decoder": byte_level,
            "model": self._bpe(self._merges(), ignore_merges=pre_tokenizer.ignore_merges),
        }

    def _merges(self) -> list[list[str]]:
        merges = []
        for merge in self._metadata.texts("tokenizer.ggml.merges"):
            # A token may begin with a space of its own.
            space = merge.find(" ", 1)
            left, right = merge[:space], merge[space + 1 :]
            if space < 0 or not {left, right, left + right} <= self._ids.keys():
                raise self._broken(f"has a merge {merge!r} of what are no tokens")
            merges.append([left, right])
        return merges

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._metadata.flag("tokenizer.ggml.add_space_prefix", True)
        to_words = {"type": "Replace", "pattern": {"String": " "}, "content": _WORD_START}
        to_spaces = {"type": "Replace", "pattern": {"String": _WORD_START}, "content": " "}
        prepend = [{"type": "Prepend", "prepend": _WORD_START}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        decoders = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_words]},
            "pre_tokenizer": None,
            "post_processor": self._ends_added(default=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(self._scored_merges(), byte_fallback=True, unknown=self._id("unknown")),
        }

    def _scored_merges(self) -> list[list[str]]:
        """Returns the pairs that make tokens, those of the highest score first: SentencePiece keeps no merges.

        Of the pairs that make one token, that with the lowest ids comes first.
        """
        scores = self._metadata.numbers("tokenizer.ggml.scores", len(self._tokens))
        found = [
            (-scores[token_id], token_id, left, right)
            for token, token_id in self._ids.items()
            if self._types[token_id] == 1
            for place in range(1, len(token))
            if (left := self._ids.get(token[:place])) is not None
            and (right := self._ids.get(token[place:])) is not None
        ]
        return [[self._tokens[left], self._tokens[right]] for _, _, left, right in sorted(found)]

    def _bpe(
        self,
        merges: list[list[str]],
        *,
        ignore_merges: bool = False,
        byte_fallback: bool = False,
        unknown: int | None = None,
    ) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else self._tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": self._ids,
            "merges": merges,
        }

    def _ends_added(self, *, default: bool) -> dict[str, Any] | None:
        """Returns the step that adds BOS before a text and EOS behind it, where the file wants them."""
        bos, eos = (self._id(name) for name in ("bos", "eos"))
        if not self._metadata.flag("tokenizer.ggml.add_bos_token", default and bos is not None):
            bos = None
        if not self._metadata.flag("tokenizer.ggml.add_eos_token", False):
            eos = None
        if bos is None and eos is None:
            return None
        before, behind = ([] if token_id is None else [self._tokens[token_id]] for token_id in (bos, eos))
        return {
            "type": "TemplateProcessing",
            "single": _template(before, "A", behind),
            "pair": [piece for name in "AB" for piece in _template(before, name, behind)],
            "special_tokens": {
                token: {"id": token, "ids": [self._ids[token]], "tokens": [token]} for token in (*before, *behind)
            },
        }

    def _broken(self, what: str) -> GGUFError:
        return GGUFError(
            f"{self._metadata.path} {what}, so its tokenizer cannot be used; convert the model again, or take another"
            " file of it"
        )


def _template(before: list[str], name: str, behind: list[str]) -> list[Mapping[str, Any]]:
    def special(tokens: list[str]) -> list[Mapping[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]

    return [*special(before), {"Sequence": {"id": name, "type_id": 0}}, *special(behind)]
