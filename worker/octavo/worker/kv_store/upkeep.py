"""A store's directory is listed, verified and cleared here, whether processes use it or not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.room import all_segments, locked, remove
from octavo.worker.kv_store.segment import SegmentError, SegmentFile, opened, read_block, read_layout, read_names


@dataclass(frozen=True)
class SegmentReport:
    """Tells what a segment holds: `blocks` that have a name, and, if they were read, `damaged` ones among its slots. A
    `fault` says why nothing of it can be of use."""

    file: SegmentFile
    identity: StoreIdentity | None = None
    blocks: int = 0
    damaged: int = 0
    fault: str = ""


def inspect(directory: Path, *, reads_blocks: bool) -> Iterator[SegmentReport]:
    """Yields a report of each segment below the directory, oldest first, by its table alone or by reading each of its
    blocks. Raises `OSError` if the directory cannot be read."""
    for file in all_segments(directory):
        try:
            yield _report(file, reads_blocks)
        except FileNotFoundError:
            # A process has made room meanwhile.
            continue
        except (OSError, SegmentError) as error:
            yield SegmentReport(file, fault=str(error))


def clear(directory: Path) -> list[SegmentFile]:
    """Removes all segments and returns them. Processes that use them go on without. Raises `OSError`."""
    with locked(directory):
        files = all_segments(directory)
        for file in files:
            remove(file)
    return files


def _report(file: SegmentFile, reads_blocks: bool) -> SegmentReport:
    with opened(file.path) as descriptor:
        layout = read_layout(descriptor)
        names = read_names(descriptor, layout)
        blocks, damaged = sum(name is not None for name in names), names.count(None)
        if reads_blocks:
            buffer = memoryview(bytearray(layout.identity.block_bytes))
            for slot, name in enumerate(names):
                damaged += name is not None and not read_block(descriptor, layout, slot, name, buffer)
    return SegmentReport(file, layout.identity, blocks, damaged)
