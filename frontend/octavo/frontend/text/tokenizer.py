"""Turns text into token ids by a model directory's own tokenizer and chat template, without running the model's code.

The tokenizer objects are never changed after loading, so any number of threads may use them at once.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from octavo.frontend.request.chat import Chat
from octavo.frontend.request.infill import Infill
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.control_tokens import ControlTokens
from octavo.frontend.text.detokenizer import Detokenizer, Vocabulary
from octavo.frontend.text.infill import InfillFormat, find_infill_format
from octavo.frontend.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from octavo.runtime.models.directory import ModelDirectoryError

_log = logging.getLogger(__name__)


class ModelTokenizer:
    """Encodes and decodes with one model's tokenizer and chat template."""

    def __init__(self, source: Path | TokenizerFiles) -> None:
        """Loads the tokenizer of a model directory, or of the files that were read there.

        Raises `ModelDirectoryError` if `source` holds no tokenizer that can be used.
        """
        self.files = read_tokenizer_files(source) if isinstance(source, Path) else source
        self._tokenizer = _plain_copy(self.files.tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._control_tokens = ControlTokens(token.content for token in added.values() if token.special)
        self._vocabulary = Vocabulary(self._tokenizer)
        self._template = ChatTemplate(self.files, self._control_tokens)

    @functools.cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """A tokenizer that reads control tokens as ordinary text; few chats need one."""
        tokenizer = _plain_copy(self.files.tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def ids(self, *, added: bool) -> dict[str, int]:
        """Returns the id of every token by its text.

        Tokens that were added to the vocabulary (control tokens mostly) are among them only if `added`.
        """
        return self._tokenizer.get_vocab(with_added_tokens=added)

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the ids of a raw prompt, in which control tokens are meant as such.

        The tokenizer adds its own tokens (a BOS) unless the text `continues` another.
        """
        return _encode(self._tokenizer, text, add_special_tokens=not continues)

    def encode_whole(
        self, text: str, second: str | None = None, longest: int | None = None, *, continues: bool = False
    ) -> tuple[list[int], int]:
        """Returns the ids of a text, or of the pair that it makes with a `second`, and where the second begins, 0 if
        the model does not tell them apart.

        What has more tokens than the `longest` is cut at the end, a pair at that of the longer text first, as
        sentence-transformers does.
        """
        pair = text if second is None else (text, second)
        [encoding] = self._tokenizer.encode_batch_fast([pair], add_special_tokens=not continues)
        kept = _kept(encoding, longest)
        types = encoding.type_ids
        types = types if kept is None else [types[place] for place in kept]
        ids = encoding.ids if kept is None else [encoding.ids[place] for place in kept]
        return ids, types.index(1) if 1 in types else 0

    def encode_chat(self, chat: Chat) -> list[int]:
        """Returns the ids of the conversation in the model's chat format.

        Control tokens come from the template alone; a control token that a client writes is text. Where a client did
        write some, the pieces between the template's control tokens are tokenized apart. Raises `ChatTemplateError`.
        """
        rendered = self._template.render(chat)
        if not self._control_tokens.holds_break(rendered):
            return _encode(self._tokenizer, rendered, add_special_tokens=False)
        return [i for text, is_control in self._control_tokens.split(rendered) for i in self._encoded(text, is_control)]

    def encode_infill(self, infill: Infill) -> list[int]:
        """Returns the ids of the prompt that has a gap filled; control tokens that a client writes are text.

        `infill_format` must not be None.
        """
        assert self.infill_format
        start = _encode(self._tokenizer, "", add_special_tokens=True)
        return self.infill_format.prompt(infill, lambda text: self._encoded(text, is_control=False), start)

    @functools.cached_property
    def infill_format(self) -> InfillFormat | None:
        """Returns the control tokens for gaps in a text; None where the tokenizer has none."""
        return find_infill_format(self.ids(added=True))

    def template_variables(self, with_tools: bool) -> frozenset[str]:
        """Returns the variables that clients may set for the model's chat template, or for that of chats with tools."""
        return self._template.variables(with_tools)

    @property
    def tells_of_tools(self) -> bool:
        """Tells whether the model's chat template describes to the model the functions that it may call."""
        return self._template.reads_tools

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of all the ids; ids outside the vocabulary have none."""
        # A batch of one, for the reason that `_encode` gives.
        [text] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def is_special(self, text: str) -> bool:
        """Tells whether `text` is a token that decoding may skip."""
        return self._vocabulary.is_special(text)

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that the token stands for within a text; an id outside the vocabulary has none."""
        return self._vocabulary.pieces[token_id]

    def added_token_id(self, text: str) -> int | None:
        """Returns the id of a token that was added to the vocabulary, None where `text` is none."""
        return self._added_ids.get(text)

    def detokenizer(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> Detokenizer[Any]:
        """Returns a detokenizer; the pieces of a stream, joined, are what `decode` gives for all of its ids.

        Special tokens that are `kept` are not skipped.
        """
        return self._vocabulary.detokenizer(skip_special_tokens=skip_special_tokens, kept=kept)

    def _encoded(self, text: str, is_control: bool) -> list[int]:
        tokenizer = self._tokenizer if is_control else self._literal_tokenizer
        return _encode(tokenizer, text, add_special_tokens=False)


def check_vocabulary(tokenizer: ModelTokenizer, directory: Path, vocab_size: int) -> None:
    """Raises `ModelDirectoryError` if ordinary text can become ids that the model has no embedding for.

    Some models lack embeddings for added tokens that they have no use for; requests that hold one are refused one by
    one. A model may well have more embeddings than tokens.
    """
    if (last := max(tokenizer.ids(added=False).values(), default=0)) >= vocab_size:
        raise ModelDirectoryError(
            f"the tokenizer in {directory} has token ids up to {last} and the model's vocab_size is {vocab_size}: they"
            " do not belong together; take tokenizer.json and config.json from the same model"
        )
    beyond = sorted(token for token, token_id in tokenizer.ids(added=True).items() if token_id >= vocab_size)
    if beyond:
        _log.warning("prompts with %s will be refused: the model's %d ids lack them", ", ".join(beyond[:5]), vocab_size)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The library's calls for one text keep the GIL, and with it the event loop, for as long as they take.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _kept(encoding: Encoding, longest: int | None) -> list[int] | None:
    """Returns the places of the tokens that are left if there may be only so many; None: all. Tokens that the tokenizer
    adds stay; of two texts the longer one loses its last token, again and again."""
    if longest is None or len(encoding.ids) <= longest:
        return None
    parts: dict[int, list[int]] = {}
    added: list[int] = []
    for place, (is_added, part) in enumerate(zip(encoding.special_tokens_mask, encoding.sequence_ids, strict=True)):
        if is_added or part is None:
            added.append(place)
        else:
            parts.setdefault(part, []).append(place)
    sizes = _sizes([len(places) for _, places in sorted(parts.items())], max(0, longest - len(added)))
    left = [place for (_, places), size in zip(sorted(parts.items()), sizes, strict=True) for place in places[:size]]
    return sorted([*added, *left])[:longest]


def _sizes(lengths: list[int], room: int) -> list[int]:
    """Returns how many tokens are left of each text, of one or two."""
    if len(lengths) != 2 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short, long = sorted(lengths)
    # Only the longer text is cut, or both to halves, of which the longer one has the greater.
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _plain_copy(tokenizer_json: str) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer_json)
    # Training may leave either in tokenizer.json; a server never cuts or pads a prompt.
    copy.no_truncation()
    copy.no_padding()
    return copy
