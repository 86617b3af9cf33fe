"""The grammars of sequences, which decide the tokens that may come next.

A sequence's matcher catches up with the tokens that the sequence has, whichever worker chose these, and however often
the sequence was preempted, forked or started anew.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from octavo.runtime.models.directory import ModelDirectoryError
from octavo.runtime.models.grammar import GrammarError, compile_grammar, is_lost, load_vocabulary, with_mask_tables
from octavo.worker.sequences import WorkerSequence

logger = logging.getLogger(__name__)

# Compiled grammars that are kept: at most so many, and in all about so much of them.
_MOST_COMPILED = 32
_MOST_BYTES = 256 << 20
# The memory of one compiled grammar, measured at its worst: at the start, for each character of its text, for each mask
# (the lexer's states are kept), and for all masks together, for the number of states is limited.
_BYTES_AT_LEAST = 64 << 10
_BYTES_OF_CHARACTER = 64
_BYTES_OF_MASK = 3 << 10
_BYTES_OF_MASKS = 16 << 20


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar's matcher at its start. The states that its copies meet are kept with it; `num_masks` counts their
    masks."""

    matcher: LLMatcher
    num_characters: int
    num_masks: int = 0

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of this grammar, which the library does not report."""
        of_masks = min(self.num_masks * _BYTES_OF_MASK, _BYTES_OF_MASKS)
        return _BYTES_AT_LEAST + self.num_characters * _BYTES_OF_CHARACTER + of_masks


@dataclass(slots=True)
class GrammarProgress:
    """A matcher of a grammar that has taken the first `num_taken` generated tokens of its sequence."""

    grammar: CompiledGrammar
    matcher: LLMatcher
    num_taken: int = 0
    # How long the last mask took.
    mask_us: int = 0

    def catch_up(self, sequence: WorkerSequence) -> None:
        """Takes the tokens generated since. The matcher is in error afterwards if one does not fit."""
        for token_id in sequence.token_ids[sequence.prompt_length + self.num_taken :]:
            # One by one: several at a time are refused, even EOS, once the text has ended.
            self.matcher.consume_token(token_id)
            self.num_taken += 1

    def ahead(self, sequence: WorkerSequence, draft: list[int]) -> Iterator[int]:
        """Takes the tokens of `draft` one by one, as far as they fit, and yields the number taken after each.

        At the end it gives them all back. `sequence` loses this follower if guesses have put it in error: another will
        follow its tokens from the start.
        """
        taken = 0
        for token_id in draft:
            # Of a text that has ended the library takes tokens without counting them.
            if self.matcher.is_stopped() or not self.matcher.try_consume_tokens([token_id]):
                break
            taken += 1
            yield taken
        self.grammar.num_masks += taken
        self.matcher.rollback(taken)
        if self.matcher.is_error():
            sequence.follower = None


class Grammars:
    """Keeps the last few compiled grammars of one model, in bounded memory; each sequence has a follower of its own.

    The vocabulary is loaded by `load`, or when it is first needed; its tables for fast masks are made with the first
    grammar, for they take a third of its memory and most workers meet none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._vocabulary: LLTokenizer | ModelDirectoryError | None = None
        self._has_mask_tables = False
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def load(self) -> None:
        """Loads the vocabulary, so that no step waits for it.

        A model whose answers cannot be constrained is no error: requests with a grammar will fail.
        """
        if self._vocabulary is None:
            try:
                self._vocabulary = load_vocabulary(self._directory)
            except ModelDirectoryError as error:
                logger.warning("%s", error)
                self._vocabulary = error

    @property
    def vocabulary(self) -> LLTokenizer:
        """Returns the vocabulary. Raises `GrammarError` if the model has none that can be used."""
        self.load()
        if not isinstance(self._vocabulary, LLTokenizer):
            raise GrammarError("the worker has no vocabulary of its model to follow it with, and its log says why")
        return self._vocabulary

    @property
    def mask_bytes(self) -> int:
        """Returns the length of a mask in bytes: whole words of 32 bits."""
        return -(-self.vocabulary.vocab_size // 32) * 4

    def progress(self, sequence: WorkerSequence) -> GrammarProgress:
        """Returns the follower of a sequence whose tokens are all known, after these tokens.

        Its matcher may be in error. Raises `GrammarError` if the grammar cannot be compiled.
        """
        if sequence.follower is None:
            sequence.follower = self._start(sequence.sampling.grammar)
        sequence.follower.catch_up(sequence)
        sequence.follower.grammar.num_masks += 1
        return sequence.follower

    def allowed(self, sequence: WorkerSequence) -> bytes:
        """Returns one bit for each token id, from the lowest of the first byte on, set if the token may come next.

        Raises `GrammarError` if the grammar cannot be compiled or followed.
        """
        matcher = self.progress(sequence).matcher
        mask = self._mask(matcher)
        return self.allowed_anew(sequence) if is_lost(matcher, mask, self.vocabulary) else mask

    def allowed_after(self, sequence: WorkerSequence, draft: list[int]) -> bytes:
        """Returns what `allowed` would if the tokens of `draft`, at least one, had been generated too.

        Raises `GrammarError` if they do not fit, or if nothing fits after them.
        """
        progress, mask = self.progress(sequence), b""
        for taken in progress.ahead(sequence, draft):
            if taken == len(draft):
                found = self._mask(progress.matcher)
                mask = b"" if is_lost(progress.matcher, found, self.vocabulary) else found
        if not mask:
            raise GrammarError("the tokens drafted do not fit")
        return mask

    def allowed_anew(self, sequence: WorkerSequence) -> bytes:
        """Returns what `allowed` does, from a grammar that is compiled anew.

        The states that all sequences of one compiled grammar have met count against its limits, and no request may fail
        for another.
        """
        self._compiled.pop(sequence.sampling.grammar, None)
        sequence.follower = None
        matcher = self.progress(sequence).matcher
        mask = self._mask(matcher)
        if is_lost(matcher, mask, self.vocabulary):
            raise GrammarError(f"no token can follow the {sequence.num_generated} generated ({matcher.stop_reason()})")
        return mask

    def _mask(self, matcher: LLMatcher) -> bytes:
        """Returns the matcher's mask without the empty word that the library may append."""
        return matcher.compute_bitmask()[: self.mask_bytes]

    def _start(self, grammar: str) -> GrammarProgress:
        if grammar not in self._compiled:
            self._make_mask_tables()
            self._compiled[grammar] = CompiledGrammar(_compiled(grammar, self.vocabulary), len(grammar))
        self._compiled.move_to_end(grammar)
        compiled = self._compiled[grammar]
        self._shrink()
        return GrammarProgress(compiled, compiled.matcher.deep_copy())

    def _make_mask_tables(self) -> None:
        if self._has_mask_tables:
            return
        began = time.monotonic()
        self._vocabulary, self._has_mask_tables = with_mask_tables(self.vocabulary), True
        logger.info("made the tables of masks for the first grammar, in %.2f s", time.monotonic() - began)

    def _shrink(self) -> None:
        """Drops the grammars that are unused for longest. A grammar grows while it is used, so every start checks the
        sizes."""
        num_bytes = sum(compiled.num_bytes for compiled in self._compiled.values())
        while self._compiled and (len(self._compiled) > _MOST_COMPILED or num_bytes > _MOST_BYTES):
            _, longest_unused = self._compiled.popitem(last=False)
            num_bytes -= longest_unused.num_bytes


def _compiled(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    try:
        return compile_grammar(grammar, vocabulary)
    except GrammarError as error:
        # The library's own words quote the grammar, and a failure is logged.
        raise GrammarError("this worker cannot compile it: is it of another version than the frontend?") from error
