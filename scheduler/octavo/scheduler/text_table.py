"""Rows as aligned text."""

from collections.abc import Iterable, Sequence


def text_table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right, under the words of `head`."""
    cells = [head.split(), *([_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(_aligned(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
