"""Tables as aligned text, no wider than the terminal."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Final


def terminal_width() -> int | None:
    """Returns the columns of the terminal; None where stdout is none, so that programs get all there is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


_GAP: Final = 2
_CUT: Final = "…"


def text_table(head: str, rows: Iterable[Sequence[object]], *, width: int | None = None, dispensable: str = "") -> str:
    """Aligns columns as wide as their widest cell, numbers to the right, under the words of `head`.

    A table that does not fit `width` loses the columns that `dispensable` names, from the first on, as many as it
    takes; if the rest is still too wide, its widest columns are cut.
    """
    columns = list(zip(*[head.split(), *([_text(value) for value in row] for row in rows)], strict=True))
    if width is not None:
        for name in dispensable.split():
            if _total(map(_width, columns)) <= width:
                break
            columns = [column for column in columns if column[0] != name]
    widths = _narrowed([_width(column) for column in columns], width)
    return "\n".join((" " * _GAP).join(map(_aligned, row, widths)).rstrip() for row in zip(*columns, strict=True))


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + _GAP * (len(found) - 1)


def _narrowed(widths: list[int], width: int | None) -> list[int]:
    """Narrows the widest columns first, each down to a character."""
    while width is not None and _total(widths) > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _aligned(cell: str, width: int) -> str:
    if len(cell) > width:
        return cell[: width - len(_CUT)] + _CUT
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
