"""Token ids to text, a few at a time: whole characters only, and in the end exactly the decoding of all ids.

How a tokenizer joins its tokens is its decoder's business; there are two cases. A byte-level one maps every token to
bytes by itself, so an incremental UTF-8 decoder does the rest. Any other one is asked to decode a short window twice,
with and without the new tokens; the difference is the new text.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from octavo.frontend.text.vocabulary import TokenKind, Vocabulary

# Tokens kept as the left context of the next window. One would do for the decoders known; it may have no text.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """The state of one stream of token ids."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that has become certain."""
        ...

    def finish(self) -> str:
        """The text that was held back, once it is known that nothing follows."""
        ...


def make_detokenizer(vocabulary: Vocabulary, *, skip_special_tokens: bool) -> Detokenizer:
    """A new stream."""
    kind = _ByteLevelDetokenizer if vocabulary.byte_level else _WindowDetokenizer
    return kind(vocabulary, skip_special_tokens)


class _ByteLevelDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._pieces = vocabulary.ordinary_pieces if skip_special_tokens else vocabulary.pieces
        # The beginning of a character that is not whole.
        self._held = b""

    def feed(self, token_ids: Iterable[int]) -> str:
        for token_id in token_ids:
            self._held += self._pieces[token_id]
        text, used = codecs.utf_8_decode(self._held, "replace", False)
        self._held = self._held[used:]
        return text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class _WindowDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._kinds = vocabulary.ordinary_kinds if skip_special_tokens else vocabulary.kinds
        self._context: list[int] = []
        self._context_text = ""
        # Tokens since the context. A run of byte tokens decodes as a whole, or each to a replacement character: only
        # its end tells.
        self._new: list[int] = []
        # Of the last token that was not left out; at the start there is none.
        self._last = TokenKind.BYTE

    def feed(self, token_ids: Iterable[int]) -> str:
        for token_id in token_ids:
            self._take(token_id)
        return self._settle() if self._new and self._last is not TokenKind.BYTE else ""

    def finish(self) -> str:
        return self._settle() if self._new else ""

    def _take(self, token_id: int) -> None:
        kind = self._kinds[token_id]
        if kind is TokenKind.SKIPPED:
            return
        # A token without text changes something only at the very start, and where it ends a run of bytes. Others are
        # left out, for a window must not grow with them.
        if kind is TokenKind.EMPTY and self._last is not TokenKind.BYTE:
            return
        self._last = kind
        self._new.append(token_id)

    def _settle(self) -> str:
        window = self._context + self._new
        self._new = []
        text = self._vocabulary.decode(window)
        grown = text[len(self._context_text) :]
        self._context = window[-_CONTEXT_TOKENS:]
        self._context_text = self._vocabulary.decode(self._context)
        if not self._context_text:
            # What a decoder does to the start of a text must stay behind us: keep all until there is text.
            self._context, self._context_text = window, text
        return grown
