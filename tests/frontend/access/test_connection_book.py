"""Who gives way where there are too many connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.access.connections import ConnectionBook, Place


class Api:
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
    api = Api(8)
    api.enter("a1", "a2", "a3", "a4", "b1", "c1", "c2", "d1")
    assert api.enter("e1") == ["e1"]
    assert api.closed == ["a1"]
    assert len(api.book) == 8


def test_nobody_has_more_than_half() -> None:
    api = Api(8)
    api.enter("b1", *(f"a{i}" for i in range(6)))
    assert api.closed == ["a0", "a1"]


def test_what_is_busy_stays_and_is_idle_anew_when_it_is_answered() -> None:
    api = Api(8)
    api.enter("a1", "a2", "a3", "a4")
    for name in ("a1", "a2"):
        api.places[name].set_busy()
    api.places["a1"].set_idle()
    api.enter("a5", "a6", "a7")
    assert api.closed == ["a3", "a4", "a1"]


def test_where_all_are_busy_who_comes_is_turned_away() -> None:
    api = Api(4)
    api.enter("a1", "a2", "b1", "b2")
    for place in api.places.values():
        place.set_busy()
    assert api.enter("a3", "c1") == []
    api.places["b1"].leave()
    assert api.enter("a3", "c1") == ["c1"]
    assert api.closed == []


def test_of_a_unix_socket_all_may_be_used() -> None:
    api = Api(4)
    api.enter(" 1", " 2", " 3", " 4")
    assert api.closed == []
    api.enter(" 5")
    assert api.closed == [" 1"]


@given(
    most=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "busy", "idle", "leave"]), st.sampled_from("abc "), st.integers(0, 4)),
        max_size=60,
    ),
)
def test_the_books_are_right(most: int, steps: list[tuple[str, str, int]]) -> None:
    api, busy = Api(most), set[str]()
    for kind, client, number in steps:
        name = f"{client}{number}"
        place = api.places.get(name)
        if kind == "enter" and place is None:
            if not api.enter(name):
                full = [each for each in api.places if each[0] == client] if client != " " else []
                assert set(full) <= busy or set(api.places) <= busy
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
                    del api.places[name]
        for closed in api.closed:
            assert closed not in busy
            del api.places[closed]
        api.closed.clear()
        assert len(api.book) == len(api.places) <= most
        for each in "abc":
            assert sum(name[0] == each for name in api.places) <= max(1, most // 2)


@pytest.mark.parametrize("times", [1, 2])
def test_leaving_twice_is_leaving(times: int) -> None:
    api = Api(4)
    api.enter("a1", "a2")
    for _ in range(times):
        api.places["a1"].leave()
    assert len(api.book) == 1
