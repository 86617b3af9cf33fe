"""Writes a gap to be filled as a prompt, by the control tokens that a model's tokenizer has for it.

Models are trained to fill in the middle by control tokens around what comes before and after the gap (Bavarian et al.,
2022, arXiv 2207.14255). Families name these tokens differently; which ones a tokenizer has tells its format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.frontend.request.infill import Infill

_Encode = Callable[[str], list[int]]

# The tokens before what precedes the gap, before what follows it, and before the filling: of Qwen and CodeGemma,
# StarCoder and Granite, SantaCoder, CodeLlama, DeepSeek, GLM.
_PREFIX_FIRST: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
# Codestral's: what follows the gap comes first, and the filling follows what precedes it without a token.
_SUFFIX_FIRST: Final = ("[PREFIX]", "[SUFFIX]")
_REPOSITORY: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE: Final = ("<|file_sep|>", "<file_sep>")
# What a filling may end with beside the model's own EOS tokens.
_ENDS: Final = (
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>"),
    *("<｜end▁of▁sentence｜>", *_REPOSITORY, *_FILE),
)
# The names that Qwen's training gives to what has none, see arXiv 2409.12186; any will do.
_PROJECT: Final = "project\n"
_THIS_FILE: Final = "this file"
# Of a prompt that is cut down, how much of what is left belongs before the gap.
_SHARE_BEFORE: Final = 0.75


@dataclass(frozen=True)
class InfillFormat:
    """Holds the ids of a tokenizer's control tokens for gaps; `middle` is None where what follows comes first.

    `repository` and `file` begin a repository and a file in it, where there are such. `ends` end a filling.
    """

    before: int
    after: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    def prompt(self, infill: Infill, encode: _Encode, start: Sequence[int]) -> list[int]:
        """Returns the token ids of the prompt. `encode` reads control tokens as text; `start` is the tokenizer's BOS,
        if it has one."""
        before, after, begun = encode(infill.prefix), encode(infill.suffix), encode(infill.begun)
        pieces = [self._piece(piece.name, encode(piece.text), encode) for piece in infill.pieces]
        opening = self._opening(bool(pieces), encode)
        if infill.most_tokens is not None:
            fixed = len(start) + len(begun) + 3
            room = max(0, infill.most_tokens - fixed)
            before, after = _nearest(before, after, room)
            pieces = _last(pieces, room - len(before) - len(after) - sum(map(len, opening)))
            opening = opening if pieces else ([], [])
        head = [*start, *opening[0], *(token_id for piece in pieces for token_id in piece), *opening[1]]
        if self.middle is None:
            return [*head, self.after, *after, self.before, *before, *begun]
        return [*head, self.before, *before, self.after, *after, self.middle, *begun]

    def _piece(self, name: str, text: list[int], encode: _Encode) -> list[int]:
        if self.file is None:
            return [*text, *encode("\n\n")]
        return [self.file, *encode(f"{name or 'file'}\n"), *text]

    def _opening(self, has_pieces: bool, encode: _Encode) -> tuple[list[int], list[int]]:
        """Returns what stands before the pieces of other files, and what between them and this one."""
        if not has_pieces or self.file is None:
            return [], []
        project = [] if self.repository is None else [self.repository, *encode(_PROJECT)]
        return project, [self.file, *encode(f"{_THIS_FILE}\n")]


def find_infill_format(ids: Mapping[str, int]) -> InfillFormat | None:
    """Returns how a model whose tokens have `ids` is asked to fill a gap; None if it was not trained to."""
    middle = None
    found = next((names for names in _PREFIX_FIRST if all(name in ids for name in names)), None)
    if found is not None:
        middle = ids[found[2]]
    elif all(name in ids for name in _SUFFIX_FIRST):
        found = (*_SUFFIX_FIRST, "")
    else:
        return None
    own = {ids[name] for name in found if name in ids}
    ends = {ids[name] for name in _ENDS if name in ids} | own
    return InfillFormat(
        before=ids[found[0]],
        after=ids[found[1]],
        middle=middle,
        repository=_first(_REPOSITORY, ids),
        file=_first(_FILE, ids),
        ends=tuple(sorted(ends)),
    )


def _first(names: Sequence[str], ids: Mapping[str, int]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _nearest(before: list[int], after: list[int], room: int) -> tuple[list[int], list[int]]:
    """Returns what of both lies nearest to the gap and fits into `room` tokens."""
    most_before = max(int(room * _SHARE_BEFORE), room - len(after))
    before = before[max(0, len(before) - most_before) :]
    return before, after[: room - len(before)]


def _last(pieces: list[list[int]], room: int) -> list[list[int]]:
    """Returns the last pieces that fit into `room` tokens together."""
    first = len(pieces)
    while first and (room := room - len(pieces[first - 1])) >= 0:
        first -= 1
    return pieces[first:]
