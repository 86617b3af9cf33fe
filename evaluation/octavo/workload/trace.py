"""Reads jobs from a CSV file and writes them to one: a row for each job, a column for each field of `Job` that
matters."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Final

from octavo.workload.job import Job

_FIELDS: Final = {field.name: field for field in fields(Job)}
_REQUIRED: Final = [name for name, field in _FIELDS.items() if field.default is MISSING]
_Cell = str | int | float


class TraceError(Exception):
    """Says that a file is no trace, with the line and the column that show it."""


def write_csv(path: Path, jobs: Iterable[Job]) -> None:
    """Raises `OSError`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(job) for job in jobs)


def read_csv(path: Path) -> list[Job]:
    """Returns the jobs of a trace in order of arrival. An empty cell is the field's default, as a column that is not
    there. Raises `TraceError` and `OSError`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = _columns(next(reader, []), path)
            jobs = [_job(columns, row, f"{path}, line {reader.line_num}") for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path}, line {reader.line_num + 1}: this is no CSV file in UTF-8: {error}") from error
    if not jobs:
        raise TraceError(f"{path} has no requests; it needs a line for each below its header")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _columns(header: list[str], path: Path) -> list[str]:
    columns = [name.strip() for name in header]
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise TraceError(f"{path}, line 1: no column {' and no column '.join(missing)}; found {columns}")
    if unknown := [name for name in columns if name not in _FIELDS]:
        raise TraceError(f"{path}, line 1: column {unknown[0]!r} is unknown; there are {', '.join(_FIELDS)}")
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise TraceError(f"{path}, line 1: column {twice[0]} is there twice")
    return columns


def _job(columns: list[str], row: list[str], where: str) -> Job:
    if len(row) != len(columns):
        raise TraceError(f"{where}: {len(row)} cells, where the header has {len(columns)} columns")
    cells = zip(columns, (cell.strip() for cell in row), strict=True)
    values = dict(_values(((name, cell) for name, cell in cells if cell), where))
    if missing := [name for name in _REQUIRED if name not in values]:
        raise TraceError(f"{where}, column {missing[0]}: it is empty, and has no default")
    try:
        return Job(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from error


def _values(cells: Iterable[tuple[str, str]], where: str) -> Iterator[tuple[str, _Cell]]:
    for name, cell in cells:
        kind = _FIELDS[name].type
        assert isinstance(kind, type)
        try:
            yield name, kind(cell)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise TraceError(f"{where}, column {name}: {cell!r} is not {what}") from error
