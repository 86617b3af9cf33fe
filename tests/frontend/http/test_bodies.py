"""The bytes of bodies that are held are bounded, and the right body gives way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.errors import Overloaded
from octavo.frontend.http.bodies import Bodies, Body


class Senders:
    """Bodies by name, and the names of those that had to give way."""

    def __init__(self, max_unfinished: int, max_held: int) -> None:
        self.bodies = Bodies(max_unfinished, max_held)
        self.evicted: list[str] = []
        self._known: dict[str, Body] = {}

    def __getitem__(self, name: str) -> Body:
        """The client is the name's first letter."""
        return self._known.setdefault(name, Body(name[0], lambda: self.evicted.append(name)))

    def grow(self, name: str, size: int) -> None:
        self.bodies.grow(self[name], size)


def test_the_oldest_that_is_unfinished_gives_way() -> None:
    senders = Senders(10, 100)
    for name in ("a1", "a2", "a3"):
        senders.grow(name, 3)
    senders.grow("a4", 3)
    assert (senders.evicted, senders.bodies.held) == (["a1"], 9)


def test_the_client_that_has_most_gives_way_first() -> None:
    senders = Senders(10, 100)
    senders.grow("b1", 1)
    for name in ("a1", "a2", "a3"):
        senders.grow(name, 3)
    senders.grow("b2", 1)
    assert senders.evicted == ["a1"]


def test_a_body_that_is_itself_the_oldest_is_refused() -> None:
    senders = Senders(10, 100)
    senders.grow("a1", 10)
    with pytest.raises(Overloaded):
        senders.grow("a1", 1)
    assert (senders.evicted, senders.bodies.held) == ([], 0)


def test_what_has_come_whole_stays_until_it_is_answered_and_then_no_more_is_taken() -> None:
    senders = Senders(10, 25)
    for name in ("a1", "a2"):
        senders.grow(name, 10)
        senders.bodies.finish(senders[name])
    senders.grow("b1", 6)
    with pytest.raises(Overloaded):
        senders.bodies.finish(senders["b1"])
    assert (senders.evicted, senders.bodies.held) == ([], 20)
    for _ in range(2):
        senders.bodies.close(senders["a1"])
    assert senders.bodies.held == 10


@given(st.lists(st.tuples(st.sampled_from(["a1", "a2", "b1", "b2", "c1"]), st.integers(-1, 6)), max_size=60))
def test_the_bounds_always_hold(steps: list[tuple[str, int]]) -> None:
    senders, sizes = Senders(10, 20), dict[str, int]()
    finished: set[str] = set()
    for name, size in steps:
        try:
            if size > 0 and name not in finished:
                sizes[name] = sizes.get(name, 0) + size
                senders.grow(name, size)
            elif size == 0 and sizes.get(name):
                senders.bodies.finish(senders[name])
                finished.add(name)
            elif size < 0:
                senders.bodies.close(senders[name])
                sizes.pop(name, None)
                finished.discard(name)
        except Overloaded:
            sizes.pop(name, None)
        for evicted in senders.evicted:
            assert evicted != name
            assert evicted not in finished
            sizes.pop(evicted, None)
        senders.evicted.clear()
        assert senders.bodies.held == sum(sizes.values()) <= 20
        assert sum(size for each, size in sizes.items() if each not in finished) <= 10
