"""What each token of a tokenizer stands for, found out once per token and only for those that are met."""

import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from tokenizers import Tokenizer

from octavo.runtime.models.directory import ModelDirectoryError

_V = TypeVar("_V")

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class UnsupportedDecoder(ModelDirectoryError):
    """The tokenizer joins its tokens in a way that cannot be followed token by token."""


class TokenKind(enum.Enum):
    """What decoding does with a token: leaves it out; takes it for one byte of a character; adds no text, in the midst
    of one; adds some."""

    SKIPPED = enum.auto()
    BYTE = enum.auto()
    EMPTY = enum.auto()
    TEXT = enum.auto()


class _Lazy(dict[int, _V]):
    """Values by token id, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> _V:
        value = self[token_id] = self._make(token_id)
        return value


class Vocabulary:
    """What all streams of one tokenizer share. Reads the tokenizer only, so any number of threads may use it.

    `pieces` are the bytes that a token stands for in the midst of a text, by token id; ids that are not in the
    vocabulary have none. In `ordinary_pieces` and `ordinary_kinds` special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = _decoder_steps(json.loads(tokenizer.to_str())["decoder"])
        self.byte_level = steps == ["ByteLevel"]
        if "CTC" in steps or ("ByteLevel" in steps and not self.byte_level):
            raise UnsupportedDecoder(
                f"tokenizer.json joins the decoders {', '.join(steps)}; ByteLevel must be alone, and CTC is for speech"
            )
        self._byte_fallback = "ByteFallback" in steps
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._byte_of_character = _byte_of_character()
        self._around = (0, "", "") if self.byte_level else self._surroundings()
        self.pieces: Mapping[int, bytes] = _Lazy(self._byte_level_piece if self.byte_level else self._piece)
        self.kinds: Mapping[int, TokenKind] = _Lazy(self._kind)
        self.ordinary_pieces: Mapping[int, bytes] = _Lazy(self._ordinary_piece)
        self.ordinary_kinds: Mapping[int, TokenKind] = _Lazy(self._ordinary_kind)

    def decode(self, token_ids: list[int]) -> str:
        """The text of exactly these tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def is_special(self, token: str) -> bool:
        """Whether the token's text is that of a special one."""
        return self._tokenizer.token_to_id(token) in self._special_ids

    def _ordinary_piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.pieces[token_id]

    def _ordinary_kind(self, token_id: int) -> TokenKind:
        return TokenKind.SKIPPED if token_id in self._special_ids else self.kinds[token_id]

    def _kind(self, token_id: int) -> TokenKind:
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            return TokenKind.SKIPPED
        if self._is_byte(token):
            return TokenKind.BYTE
        return TokenKind.TEXT if self.pieces[token_id] else TokenKind.EMPTY

    def _is_byte(self, token: str) -> bool:
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def _byte_level_piece(self, token_id: int) -> bytes:
        """A token that is not written in the byte alphabet stands for itself."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:
            return token.encode()

    def _piece(self, token_id: int) -> bytes:
        """What the token adds between two others, for decoders treat the first and the last one differently."""
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            return b""
        if self._is_byte(token):
            return bytes([int(token[3:5], 16)])
        beside, left, right = self._around
        text = self.decode([beside, token_id, beside])
        return text[len(left) : len(text) - len(right)].encode()

    def _surroundings(self) -> tuple[int, str, str]:
        """A token that is a letter, its text where it comes first, and where it comes last."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            left = self.decode([token_id])
            both = self.decode([token_id, token_id])
            if left.isalpha() and both.startswith(left) and len(both) > len(left):
                return token_id, left, both[len(left) :]
        raise UnsupportedDecoder("tokenizer.json has no token that is a letter; use the file that belongs to the model")


def _decoder_steps(decoder: dict[str, object] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        assert isinstance(parts, list)
        return [kind for part in parts for kind in _decoder_steps(part)]
    return [str(decoder["type"])]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
