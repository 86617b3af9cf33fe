"""Stop strings are found wherever the text is cut, and nothing is held back that need not be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.text.detokenizer import StopStrings

quickly = settings(max_examples=200, deadline=None, derandomize=True)


def scan(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    scanner, text = StopStrings(stops, include_stop=include_stop), ""
    for piece in pieces:
        scanned = scanner.feed(piece)
        text += scanned.text
        if scanned.matched is not None:
            return text, scanned.matched
    return text + scanner.flush(), None


def earliest_end(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule itself, on the whole text."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@quickly
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
)
def test_the_cut_does_not_matter(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    text, matched = earliest_end(stops, "".join(pieces))
    expected = (text + matched if include_stop and matched else text), matched
    assert scan(stops, pieces, include_stop) == expected


@quickly
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8), stops=st.lists(st.text("ab", min_size=1), max_size=3))
def test_only_a_possible_start_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scanner, sent, seen = StopStrings(stops, include_stop=False), "", ""
    for piece in pieces:
        scanned = scanner.feed(piece)
        if scanned.matched is not None:
            return
        sent, seen = sent + scanned.text, seen + piece
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_across_pieces() -> None:
    assert scan(["</end>"], ["text <", "/e", "nd> more"]) == ("text ", "</end>")


def test_a_false_start_is_let_go() -> None:
    assert scan(["</end>"], ["a </e", "x"]) == ("a </ex", None)


def test_held_text_comes_with_the_end() -> None:
    assert scan(["</end>"], ["a </e"]) == ("a </e", None)


def test_the_stop_string_is_kept_when_asked() -> None:
    assert scan(["END"], ["one E", "ND two"], include_stop=True) == ("one END", "END")


@quickly
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    unsearched=st.integers(0, 8),
)
def test_a_match_ends_in_what_is_searched_wherever_it_begins(
    pieces: list[str], stops: list[str], unsearched: int
) -> None:
    scanner, sent, matched = StopStrings(stops, include_stop=True), "", None
    for number, piece in enumerate(pieces):
        scanned = scanner.feed(piece, searching=number >= unsearched)
        sent += scanned.text
        if (matched := scanned.matched) is not None:
            break
    whole, border = "".join(pieces), len("".join(pieces[:unsearched]))
    ends = [end for end in range(border + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    assert sent + scanner.flush() == (whole[: ends[0]] if ends else whole)
    assert (matched is not None) == bool(ends)
