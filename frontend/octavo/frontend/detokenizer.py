"""Token ids to text, a few at a time: whole characters only, and in the end exactly the decoding of all ids.

How a tokenizer joins its tokens is its decoder's business; there are two cases. A byte-level one maps every token to
bytes by itself, so an incremental UTF-8 decoder does the rest. Any other one is asked to decode a short window twice,
with and without the new tokens; the difference is the new text.
"""

import codecs
import json
import re
from collections.abc import Iterable
from typing import Final, Protocol

from tokenizers import Tokenizer

from octavo.wire.model_directory import ModelDirectoryError

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Tokens kept as the left context of the next window. One would do for the decoders known; it may have no text.
_CONTEXT_TOKENS = 4


class UnsupportedDecoder(ModelDirectoryError):
    """The tokenizer joins its tokens in a way that cannot be followed token by token."""


class Detokenizer(Protocol):
    """The state of one stream of token ids."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that has become certain."""
        ...

    def finish(self) -> str:
        """The text that was held back, once it is known that nothing follows."""
        ...


class Vocabulary:
    """What all streams of one tokenizer share. Reads the tokenizer only, so any number of threads may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kinds = _decoder_kinds(decoder)
        self._byte_level = kinds == ["ByteLevel"]
        if "ByteLevel" in kinds and not self._byte_level:
            raise UnsupportedDecoder(f"tokenizer.json joins the decoders {', '.join(kinds)}; ByteLevel must be alone")
        self._byte_fallback = "ByteFallback" in kinds
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._byte_of_character = _byte_of_character()

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new stream."""
        kind = _ByteLevelDetokenizer if self._byte_level else _WindowDetokenizer
        return kind(self, skip_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """The text of exactly these tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the id is decoded at all: unknown ones never are, special ones unless skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks."""
        token = self._tokenizer.id_to_token(token_id)
        return self._byte_fallback and token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a byte-level token stands for; one that is not written in their alphabet stands for itself."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:
            return token.encode()


class _ByteLevelDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        vocabulary = self._vocabulary
        kept = (i for i in token_ids if vocabulary.has_text(i, self._skip_special_tokens))
        return self._utf8.decode(b"".join(map(vocabulary.bytes_of, kept)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        # A run of byte tokens decodes as a whole, or each to a replacement character: only its end tells.
        self._run: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> str:
        kept = [i for i in token_ids if self._vocabulary.has_text(i, self._skip_special_tokens)]
        settled = len(kept)
        while settled and self._vocabulary.is_byte(kept[settled - 1]):
            settled -= 1
        if settled == 0:
            self._run += kept
            return ""
        new, self._run = self._run + kept[:settled], kept[settled:]
        return self._settle(new)

    def finish(self) -> str:
        new, self._run = self._run, []
        return self._settle(new) if new else ""

    def _settle(self, new: list[int]) -> str:
        window = self._context + new
        text = self._vocabulary.decode(window)
        grown = text[len(self._context_text) :]
        self._context = window[-_CONTEXT_TOKENS:]
        self._context_text = self._vocabulary.decode(self._context)
        if not self._context_text:
            # What a decoder does to the start of a text must stay behind us: keep all until there is text.
            self._context, self._context_text = window, text
        return grown


def _decoder_kinds(decoder: dict[str, object] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        assert isinstance(parts, list)
        return [kind for part in parts for kind in _decoder_kinds(part)]
    return [str(decoder["type"])]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
