"""Reads a text into windows of token ids.

The text that comes along is the beginning of "Alice's Adventures in Wonderland" by Lewis Carroll (1865), chapters I to
III, which belongs to everybody.
"""

from pathlib import Path

from tokenizers import Tokenizer

from octavo.frontend.text.tokenizer_files import read_tokenizer_files_apart

ALICE = Path(__file__).with_name("alice.txt")


class TextError(ValueError):
    """Raised for a text that cannot be read, or that is too short."""


def windows(text: Path, directory: Path, length: int, most: int | None) -> list[list[int]]:
    """Returns the first `most` windows (None: all) of `length` tokens each, side by side, of the file `text`, by the
    tokenizer in `directory`; what is left at the end is dropped.

    Where the tokenizer puts a token before every text (BOS), it stands in the place of each window's first token, for a
    model that was trained so predicts badly without. Raises `TextError` or
    `octavo.runtime.models.directory.ModelDirectoryError`.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read {text} as UTF-8 text: {error}") from error
    tokenizer = Tokenizer.from_str(read_tokenizer_files_apart(directory).tokenizer)
    plain: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
    begin: list[int] = tokenizer.encode("", add_special_tokens=True).ids[:1]
    tokens = [*begin, *plain]
    firsts = range(0, len(tokens) - length + 1, length)[:most]
    if not firsts:
        raise TextError(
            f"{text} has {len(plain)} tokens and a window {length}: take a longer text, or a shorter --window"
        )
    return [[*begin, *tokens[first + len(begin) : first + length]] for first in firsts]
