"""Turns token ids into text, a few at a time: whole characters only, and in the end the decoding of all ids.

A byte-level tokenizer maps every token to bytes by itself, so an incremental UTF-8 decoder does the rest. Any other
tokenizer decodes a short window twice, with and without the new tokens; the difference is the new text. Stop strings
are found in the text as it comes.
"""

import codecs
import enum
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tokenizers import Tokenizer

from octavo.frontend.answer_parsers.scanning import overlap
from octavo.runtime.models.directory import ModelDirectoryError

_V = TypeVar("_V")
_H = TypeVar("_H")

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class UnsupportedDecoder(ModelDirectoryError):
    """The tokenizer joins its tokens in a way that cannot be followed token by token."""


class TokenKind(enum.Enum):
    """Tells how decoding treats a token within a text.

    `SKIPPED` is left out, `BYTE` is one byte of a character, `EMPTY` adds no text, `TEXT` adds some.
    """

    SKIPPED = enum.auto()
    BYTE = enum.auto()
    EMPTY = enum.auto()
    TEXT = enum.auto()


class _Lazy(dict[int, _V]):
    """Holds values by token id, and makes each when it is first asked for."""

    def __init__(self, make: Callable[[int], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> _V:
        value = self[token_id] = self._make(token_id)
        return value


class Vocabulary:
    """Tells what each token of a tokenizer stands for; all streams of the tokenizer share one object.

    The object only reads the tokenizer, so any number of threads may use it. `pieces` maps a token id to the bytes
    that the token stands for within a text; ids that are not in the vocabulary have none.
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
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_of_character = _byte_of_character()
        self._around = (0, "", "") if self.byte_level else self._surroundings()
        self.pieces: Mapping[int, bytes] = _Lazy(self._byte_level_piece if self.byte_level else self._piece)
        self.kinds: Mapping[int, TokenKind] = _Lazy(self._kind)
        self._detokenizer = self._make_detokenizer(self.pieces, self.kinds)
        # Detokenizers that leave out special tokens but for those kept.
        self._leaving_out: dict[frozenset[int], Detokenizer[Any]] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of exactly these tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> "Detokenizer[Any]":
        """Returns the detokenizer of streams of which special tokens but those `kept` are left out, or none."""
        if not skip_special_tokens:
            return self._detokenizer
        kept_ids = self._special_ids & set(map(self._tokenizer.token_to_id, kept))
        if kept_ids not in self._leaving_out:
            self._leaving_out[kept_ids] = self._detokenizer_without(self._special_ids - kept_ids)
        return self._leaving_out[kept_ids]

    def is_special(self, token: str) -> bool:
        """Tells whether `token` is the text of a special token."""
        return self._tokenizer.token_to_id(token) in self._special_ids

    def _make_detokenizer(self, pieces: Mapping[int, bytes], kinds: Mapping[int, TokenKind]) -> "Detokenizer[Any]":
        return _ByteLevelDetokenizer(pieces) if self.byte_level else _WindowDetokenizer(self, kinds)

    def _detokenizer_without(self, left_out: Set[int]) -> "Detokenizer[Any]":
        pieces = _Lazy(lambda token_id: b"" if token_id in left_out else self.pieces[token_id])
        kinds = _Lazy(lambda token_id: TokenKind.SKIPPED if token_id in left_out else self.kinds[token_id])
        return self._make_detokenizer(pieces, kinds)

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
        """Returns the bytes that the token adds between others; decoders treat first and last tokens differently."""
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            return b""
        if self._is_byte(token):
            return bytes([int(token[3:5], 16)])
        beside, left, right = self._around
        text = self.decode([beside, token_id, beside])
        return text[len(left) : len(text) - len(right)].encode()

    def _surroundings(self) -> tuple[int, str, str]:
        """Finds a token that is a letter; returns its id, its text as the first token, and its text as the last."""
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
    """Returns the byte-level alphabet of GPT-2.

    Printable Latin-1 bytes stand for themselves, and characters from U+0100 on for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Scanned(NamedTuple):
    """Holds the `text` that may be sent, the text `held` back behind it, and the stop string that ends it, if any."""

    text: str
    held: str
    matched: str | None = None


def scan(stop_strings: Sequence[str], held: str, text: str, *, include_stop: bool, searching: bool = True) -> Scanned:
    """Finds stop strings in a text that arrives in pieces: `text` is the next piece, `held` what was held back before.

    Only what could begin a stop string is held back. The match that is complete first wins, and the longest among
    matches that are complete at once, so the result does not depend on how the text was cut into pieces. While
    `searching` is off no stop string is found that ends in `text`; a stop string may begin there.
    """
    buffer = held + text
    if searching and (found := _matches(stop_strings, buffer, len(held))):
        end, start, stop = min(found)
        return Scanned(buffer[: end if include_stop else start], "", stop)
    sent = len(buffer) - max((overlap(buffer, stop) for stop in stop_strings), default=0)
    return Scanned(buffer[:sent], buffer[sent:])


def _matches(stop_strings: Sequence[str], buffer: str, held: int) -> list[tuple[int, int, str]]:
    """Returns (end, start, stop string) for each stop string's first match in `buffer` that ends beyond `held`."""
    starts = [(buffer.find(stop, max(0, held - len(stop) + 1)), stop) for stop in stop_strings]
    return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]


# Tokens kept as the left context of the next window. One would do for the decoders known; it may have no text.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol[_H]):
    """Decodes any number of streams of token ids. What is held of a stream between two calls is the caller's to keep:
    `start` at first, then what the latest call has returned, and nothing older."""

    @property
    def start(self) -> _H:
        """Returns what is held of a new stream."""
        ...

    def feed(self, held: _H, token_ids: Iterable[int]) -> tuple[str, _H]:
        """Takes the next ids; returns the text that later ids cannot change, and what is held now."""
        ...

    def finish(self, held: _H) -> str:
        """Returns the text of what is held, once it is known that nothing follows."""
        ...


class DetokenizerSource(Protocol):
    """Has detokenizers for streams with special tokens in their text, and without."""

    def detokenizer(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> Detokenizer[Any]:
        """Returns the detokenizer, which streams share. Special tokens that are `kept` are not skipped."""
        ...


class _ByteLevelDetokenizer:
    """Holds the first bytes of a character that is not complete."""

    start: Final = b""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces

    def feed(self, held: bytes, token_ids: Iterable[int]) -> tuple[str, bytes]:
        for token_id in token_ids:
            held += self._pieces[token_id]
        text, used = codecs.utf_8_decode(held, "replace", False)
        return text, held[used:]

    def finish(self, held: bytes) -> str:
        return codecs.utf_8_decode(held, "replace", True)[0]


# The context and its text; the tokens since the context; and the kind of the last token that was not left out, which is
# `BYTE` before the first. A run of byte tokens decodes as a whole, or each to a replacement character: only its end
# tells.
_Window = tuple[list[int], str, list[int], TokenKind]


class _WindowDetokenizer:
    """Holds a window of the last tokens."""

    def __init__(self, vocabulary: Vocabulary, kinds: Mapping[int, TokenKind]) -> None:
        self._vocabulary = vocabulary
        self._kinds = kinds

    @property
    def start(self) -> _Window:
        return [], "", [], TokenKind.BYTE

    def feed(self, held: _Window, token_ids: Iterable[int]) -> tuple[str, _Window]:
        context, context_text, new, last = held
        for token_id in token_ids:
            kind = self._kinds[token_id]
            # A token without text changes something only at the very start, and where it ends a run of bytes. Others
            # are left out, for a window must not grow with them.
            if kind is TokenKind.SKIPPED or (kind is TokenKind.EMPTY and last is not TokenKind.BYTE):
                continue
            last = kind
            new.append(token_id)
        if not new or last is TokenKind.BYTE:
            return "", (context, context_text, new, last)
        window = context + new
        text = self._vocabulary.decode(window)
        grown = text[len(context_text) :]
        context = window[-_CONTEXT_TOKENS:]
        context_text = self._vocabulary.decode(context)
        if not context_text:
            # What a decoder does to the start of a text must stay behind us: keep all until there is text.
            context, context_text = window, text
        return grown, (context, context_text, [], last)

    def finish(self, held: _Window) -> str:
        context, context_text, new, _ = held
        return self._vocabulary.decode(context + new)[len(context_text) :] if new else ""
