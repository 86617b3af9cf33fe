"""Stop strings are found wherever the text is cut, and nothing is held back that need not be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.text.detokenizer import scan

quickly = settings(max_examples=200, deadline=None, derandomize=True)


def scan_all(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    text, held = "", ""
    for piece in pieces:
        more, held, matched = scan(stops, held, piece, include_stop=include_stop)
        text += more
        if matched is not None:
            return text, matched
    return text + held, None


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
    assert scan_all(stops, pieces, include_stop) == expected


@quickly
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8), stops=st.lists(st.text("ab", min_size=1), max_size=3))
def test_only_a_possible_start_is_held_back(pieces: list[str], stops: list[str]) -> None:
    sent, held, seen = "", "", ""
    for piece in pieces:
        text, held, matched = scan(stops, held, piece, include_stop=False)
        if matched is not None:
            return
        sent, seen = sent + text, seen + piece
        assert seen == sent + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_across_pieces() -> None:
    assert scan_all(["</end>"], ["text <", "/e", "nd> more"]) == ("text ", "</end>")


def test_a_false_start_is_let_go() -> None:
    assert scan_all(["</end>"], ["a </e", "x"]) == ("a </ex", None)


def test_held_text_comes_with_the_end() -> None:
    assert scan_all(["</end>"], ["a </e"]) == ("a </e", None)


def test_the_stop_string_is_kept_when_asked() -> None:
    assert scan_all(["END"], ["one E", "ND two"], include_stop=True) == ("one END", "END")


@quickly
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    unsearched=st.integers(0, 8),
)
def test_a_match_ends_in_what_is_searched_wherever_it_begins(
    pieces: list[str], stops: list[str], unsearched: int
) -> None:
    sent, held, matched = "", "", None
    for number, piece in enumerate(pieces):
        text, held, matched = scan(stops, held, piece, include_stop=True, searching=number >= unsearched)
        sent += text
        if matched is not None:
            break
    whole, border = "".join(pieces), len("".join(pieces[:unsearched]))
    ends = [end for end in range(border + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    assert sent + held == (whole[: ends[0]] if ends else whole)
    assert (matched is not None) == bool(ends)
