"""Who gives way where there are too many connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.access.connections import ConnectionBook, Place


class Door:
    """Connections by name; a client's begin with its letter."""

    def __init__(self, most: int) -> None:
        self.book = ConnectionBook(most)
        self.closed: list[str] = []
        self.places: dict[str, Place] = {}

    def enter(self, *names: str) -> list[str]:
        """Those that were let in."""
        entered = []
        for name in names:
            if place := self.book.enter(name[0].strip(), lambda name=name: self.closed.append(name)):  # type: ignore[misc]
                self.places[name] = place
                entered.append(name)
        return entered


def test_the_longest_idle_of_the_client_with_most_gives_way() -> None:
    door = Door(8)
    door.enter("a1", "a2", "a3", "a4", "b1", "c1", "c2", "d1")
    assert door.enter("e1") == ["e1"]
    assert door.closed == ["a1"]
    assert len(door.book) == 8


def test_nobody_has_more_than_half() -> None:
    door = Door(8)
    door.enter("b1", *(f"a{i}" for i in range(6)))
    assert door.closed == ["a0", "a1"]


def test_what_is_busy_stays_and_is_idle_anew_when_it_is_answered() -> None:
    door = Door(8)
    door.enter("a1", "a2", "a3", "a4")
    for name in ("a1", "a2"):
        door.places[name].set_busy()
    door.places["a1"].set_idle()
    door.enter("a5", "a6", "a7")
    assert door.closed == ["a3", "a4", "a1"]


def test_where_all_are_busy_who_comes_is_turned_away() -> None:
    door = Door(4)
    door.enter("a1", "a2", "b1", "b2")
    for place in door.places.values():
        place.set_busy()
    assert door.enter("a3", "c1") == []
    door.places["b1"].leave()
    assert door.enter("a3", "c1") == ["c1"]
    assert door.closed == []


def test_of_a_unix_socket_all_may_be_used() -> None:
    door = Door(4)
    door.enter(" 1", " 2", " 3", " 4")
    assert door.closed == []
    door.enter(" 5")
    assert door.closed == [" 1"]


@given(
    most=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "busy", "idle", "leave"]), st.sampled_from("abc "), st.integers(0, 4)),
        max_size=60,
    ),
)
def test_the_books_are_right(most: int, steps: list[tuple[str, str, int]]) -> None:
    door, busy = Door(most), set[str]()
    for kind, client, number in steps:
        name = f"{client}{number}"
        place = door.places.get(name)
        if kind == "enter" and place is None:
            if not door.enter(name):
                full = [each for each in door.places if each[0] == client] if client != " " else []
                assert set(full) <= busy or set(door.places) <= busy
        elif place:
            match kind:
                case "busy":
                    place.set_busy()
                    busy.add(name)
                case "idle":
                    place.set_idle()
                    busy.discard(name)
                case "leave":
                    place.leave()
                    busy.discard(name)
                    del door.places[name]
        for closed in door.closed:
            assert closed not in busy
            del door.places[closed]
        door.closed.clear()
        assert len(door.book) == len(door.places) <= most
        for each in "abc":
            assert sum(name[0] == each for name in door.places) <= max(1, most // 2)


@pytest.mark.parametrize("times", [1, 2])
def test_leaving_twice_is_leaving(times: int) -> None:
    door = Door(4)
    door.enter("a1", "a2")
    for _ in range(times):
        door.places["a1"].leave()
    assert len(door.book) == 1
