"""Compiles grammars in a frontend and in a worker alike: both use the same vocabulary, limits and calls of llguidance,
so that a grammar that one of them has compiled the other compiles too."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.runtime.models.directory import ModelDirectoryError

# A step waits for its slowest mask: these keep what cannot be told from a grammar's size to some tens of milliseconds,
# and the memory of one grammar to some tens of megabytes.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    # Ways in which the text so far can be read, with whose square the time of a token grows: 100 optional properties of
    # an object are 400.
    max_items_in_row=500,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    # Its errors are logged, and must not quote what was generated.
    verbose_errors=False,
)
# The library follows a chain of rules by recursion, and an overflow kills the process: this is far more than any
# grammar that may be sent can take. Only what is touched becomes memory.
_STACK_BYTES = 256 << 20
_stack_size = threading.Lock()


class GrammarError(ValueError):
    """Says why a grammar cannot be compiled, in the words of the library."""


def load_vocabulary(directory: Path) -> LLTokenizer:
    """Returns the texts of the tokens of the model in `directory`, and which of the tokens end a text. Takes some
    tenths of a second, of 262,144 tokens two, and holds Python's global lock all the while.

    It has no tables for fast masks (`with_mask_tables`). Raises `ModelDirectoryError` if the model's answers cannot be
    constrained.
    """
    eos_token_ids = _eos_token_ids(directory)
    if not eos_token_ids:
        raise ModelDirectoryError(
            f"answers cannot be constrained: {directory} names no eos_token_id, so no token could end one; name it in"
            " generation_config.json"
        )
    try:
        return LLTokenizer(str(directory / "tokenizer.json"), eos_token=eos_token_ids, slices=[])
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelDirectoryError(
            f"answers cannot be constrained: the tokenizer in {directory} does not tell the bytes of its tokens:"
            f" {' '.join(str(error).split())}"
        ) from error


def with_mask_tables(vocabulary: LLTokenizer) -> LLTokenizer:
    """Returns `vocabulary` with tables of the tokens that fit common parts of grammars, such as strings of JSON.

    The masks of grammars that are compiled with it are the same, and where many tokens are allowed take a fiftieth of
    the time. Of 262,144 tokens the tables take 85 MB, and half a second under Python's global lock.
    """
    return vocabulary.with_slices(LLTokenizer.general_slices())


def compile_grammar(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the start of `grammar`, with its first mask computed. Raises `GrammarError`."""
    found: list[LLMatcher] = []
    with _stack_size:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: found.append(_compiled(grammar, vocabulary)), name="grammar")
            thread.start()
        except RuntimeError as error:
            raise GrammarError(f"there is no memory to compile it in: {error}") from error
        finally:
            threading.stack_size(usual)
    thread.join()
    [matcher] = found
    if matcher.is_error():
        raise GrammarError(matcher.get_error().replace("<non-verbose/>", "").strip())
    return matcher


def is_lost(matcher: LLMatcher, mask: Sequence[int], vocabulary: LLTokenizer) -> bool:
    """Returns whether no token can follow. `matcher` has failed, or the vocabulary lacks the token that must come: then
    `mask`, the bytes of the tokens allowed next, lets the text end though the grammar does not."""
    end = vocabulary.eos_token
    return matcher.is_error() or (bool(mask[end // 8] >> end % 8 & 1) and not matcher.is_accepting())


def _compiled(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        # What of a grammar explodes does so only here.
        matcher.compute_bitmask()
    return matcher


def _eos_token_ids(directory: Path) -> list[int]:
    """Returns the ids of generation_config.json, else of config.json."""
    config = _read_json(directory / "config.json")
    for values in (_read_json(directory / "generation_config.json"), config.get("text_config") or config):
        found = values.get("eos_token_id")
        if found is not None:
            return list(dict.fromkeys(found)) if isinstance(found, list) else [found]
    return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds no JSON object")
    return content
