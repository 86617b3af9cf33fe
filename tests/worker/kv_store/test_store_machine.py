"""Any history of writes, reads, restarts, kills and damage, of two stores in one directory: what is found has the right
bytes, and what nothing has happened to is found."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from octavo.testing.small.kv_blocks import BLOCK_BYTES, EAGER, IDENTITY, got, name_of, put
from octavo.worker.kv_store.segment import SegmentLayout
from octavo.worker.kv_store.store import KVStore

# No history fills it, so nothing makes way. A segment has few slots.
CAPACITY = 16 * 9500
LAYOUT = SegmentLayout.within(IDENTITY, CAPACITY // 16)
NUMBERS = range(30)
NUMBER_OF = {name_of(number): number for number in NUMBERS}
which = st.integers(0, 1)
numbers = st.sampled_from(NUMBERS)
# Parts of a whole that is not known before.
shares = st.floats(0, 1, exclude_max=True)


class StoreMachine(RuleBasedStateMachine):
    """Holds two stores to the set of blocks that are `there`. A block in `doubt` had a copy that was damaged, which a
    store may take for whole until it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kv-store-"))
        self.there: set[int] = set()
        self.doubt: set[int] = set()
        self.start()

    def start(self) -> None:
        self.stores = [KVStore(self.directory / "kv", CAPACITY, IDENTITY, EAGER) for _ in range(2)]

    def file(self, share: float) -> Path | None:
        """One of the segments. How many there are is for threads to say, so nothing that is drawn may depend on it."""
        files = sorted(self.directory.glob("kv/*/*.kv"))
        return files[int(share * len(files))] if files else None

    @rule(which=which, chosen=st.sets(numbers, min_size=4))
    def write(self, which: int, chosen: set[int]) -> None:
        put(self.stores[which], *sorted(chosen))
        self.there |= chosen - self.doubt

    @rule(which=which)
    def read(self, which: int) -> None:
        found = set(got(self.stores[which], NUMBERS))
        assert self.there <= found <= self.there | self.doubt

    @rule(which=which)
    def restart(self, which: int) -> None:
        assert self.stores[which].close()
        self.stores[which] = KVStore(self.directory / "kv", CAPACITY, IDENTITY, EAGER)

    @rule(which=shares, length=shares)
    def kill(self, which: float, length: float) -> None:
        """The processes die, and of some segment only a beginning is there."""
        assert all(store.close() for store in self.stores)
        if (path := self.file(which)) is not None:
            left = int(length * path.stat().st_size)
            self.loses(path, max(0, left - LAYOUT.first_slot) // BLOCK_BYTES)
            os.truncate(path, left)
        self.start()

    @rule(which=shares, where=shares, is_payload=st.booleans(), place=shares, bit=st.integers(0, 7))
    def damage(self, which: float, where: float, is_payload: bool, place: float, bit: int) -> None:
        if (path := self.file(which)) is None:
            return
        filled = (path.stat().st_size - LAYOUT.first_slot) // BLOCK_BYTES
        if filled > 0:
            slot = int(where * filled)
            start, size = (LAYOUT.payload_at(slot), 192) if is_payload else (LAYOUT.entry_at(slot), 48)
            self.loses(path, slot, slot + 1)
            self.flip(path, start + int(place * size), bit)

    @rule(which=shares, place=st.integers(0, 100), bit=st.integers(0, 7))
    def damage_header(self, which: float, place: int, bit: int) -> None:
        assert all(store.close() for store in self.stores)
        if (path := self.file(which)) is not None and place < path.stat().st_size:
            self.loses(path)
            self.flip(path, place, bit)
        self.start()

    @rule()
    def clear(self) -> None:
        """Somebody removes all of it under the processes."""
        shutil.rmtree(self.directory / "kv", ignore_errors=True)
        self.doubt |= self.there
        self.there.clear()

    def loses(self, path: Path, start: int = 0, stop: int = LAYOUT.slots) -> None:
        content = path.read_bytes()
        entries = (content[LAYOUT.entry_at(slot) :][:32] for slot in range(start, stop))
        lost = {NUMBER_OF[name] for name in entries if name in NUMBER_OF}
        self.doubt |= lost
        self.there -= lost

    def flip(self, path: Path, place: int, bit: int) -> None:
        with path.open("r+b") as file:
            file.seek(place)
            (value,) = file.read(1)
            file.seek(place)
            file.write(bytes([value ^ 1 << bit]))

    def teardown(self) -> None:
        assert all(store.close() for store in self.stores)
        shutil.rmtree(self.directory)


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase
