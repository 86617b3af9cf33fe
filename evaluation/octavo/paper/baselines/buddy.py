"""Allocates chunks of powers of two, split when they are too large and merged with their twins when free (a buddy
allocator)."""

from collections.abc import Iterator


class BuddyAllocator:
    """Allocates from `size` slots, which need not be a power of two: the pool is a row of trees, one for each power of
    two in `size`, largest first. A chunk is known by its first slot."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least 1 slot, not {size}")
        self.size = size
        self.num_free = size
        # By order (the logarithm of a chunk's size): first slots, in the order in which they came free.
        self._free: list[dict[int, None]] = [{} for _ in range(size.bit_length())]
        self._trees = tuple(_powers(size))
        self._orders: dict[int, int] = {}
        for first, order in self._trees:
            self._free[order][first] = None

    def can_allocate(self, num_slots: int, count: int = 1) -> bool:
        """Returns whether there is room for `count` chunks of `num_slots` slots."""
        order = _order(num_slots)
        larger = enumerate(self._free[order:])
        return sum(len(chunks) << above for above, chunks in larger) >= count

    def can_ever_allocate(self, num_slots: int, count: int = 1) -> bool:
        """Returns whether there would be room for `count` chunks of `num_slots` slots if nothing else held any."""
        order = _order(num_slots)
        return sum(1 << (larger - order) for _, larger in self._trees if larger >= order) >= count

    def allocate(self, num_slots: int) -> int:
        """Returns a chunk of the least power of two that holds `num_slots`. Raises `ValueError` if there is none."""
        order = _order(num_slots)
        source = next((larger for larger in range(order, len(self._free)) if self._free[larger]), None)
        if source is None:
            raise ValueError(f"no chunk of {1 << order} slots is free, though {self.num_free} slots are")
        first, _ = self._free[source].popitem()
        for smaller in range(source - 1, order - 1, -1):
            self._free[smaller][first + (1 << smaller)] = None
        self._orders[first] = order
        self.num_free -= 1 << order
        return first

    def free(self, first: int) -> None:
        """Gives a chunk back. Raises `ValueError` if none begins there."""
        order = self._orders.pop(first, None)
        if order is None:
            raise ValueError(f"no chunk begins at slot {first}")
        self.num_free += 1 << order
        base, top = self._tree(first)
        while order < top and (twin := base + ((first - base) ^ (1 << order))) in self._free[order]:
            del self._free[order][twin]
            first, order = min(first, twin), order + 1
        self._free[order][first] = None

    def size_of(self, first: int) -> int:
        """Returns the number of slots of the chunk that begins there."""
        return 1 << self._orders[first]

    @property
    def largest_free(self) -> int:
        """Returns the number of slots of the largest chunk that could be had; 0 if there is none."""
        return max((1 << order for order, chunks in enumerate(self._free) if chunks), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free slots that the largest chunk could not have; 0 where nothing is free."""
        return 1.0 - self.largest_free / self.num_free if self.num_free else 0.0

    def check(self) -> None:
        """Asserts that chunks, held and free, cover all slots once, and that no two free twins are apart."""
        held = list(self._orders.items())
        free = [(first, order) for order, chunks in enumerate(self._free) for first in chunks]
        end = 0
        for first, order in sorted(held + free):
            assert first == end, f"slots from {min(first, end)} are in two chunks, or in none"
            end = first + (1 << order)
        assert end == self.size
        assert self.num_free == sum(1 << order for _, order in free)
        for first, order in free:
            base, top = self._tree(first)
            twin = base + ((first - base) ^ (1 << order))
            assert order == top or twin not in self._free[order], f"free twins {first} and {twin} are not merged"

    def _tree(self, first: int) -> tuple[int, int]:
        """Returns the first slot and the order of the tree that a slot is in."""
        return next((base, order) for base, order in reversed(self._trees) if base <= first)


def _order(num_slots: int) -> int:
    if num_slots < 1:
        raise ValueError(f"a chunk has at least 1 slot, not {num_slots}")
    return (num_slots - 1).bit_length()


def _powers(size: int) -> Iterator[tuple[int, int]]:
    """Yields first slots and orders of the powers of two in `size`, largest first."""
    first = 0
    for order in range(size.bit_length() - 1, -1, -1):
        if size >> order & 1:
            yield first, order
            first += 1 << order
