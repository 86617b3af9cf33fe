import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.runtime.telemetry.traceparent import SpanName, parse, write

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read_again(trace_id: int, span_id: int, sampled: bool) -> None:
    name = SpanName(trace_id, span_id, sampled)
    assert parse(write(name)) == name
    assert len(write(name)) == 55


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("fe", False)])
def test_only_the_lowest_flag_says_whether_a_span_is_recorded(flags: str, sampled: bool) -> None:
    assert parse(f"00-{TRACE}-{SPAN}-{flags}") == SpanName(int(TRACE, 16), int(SPAN, 16), sampled)


def test_later_versions_may_say_more() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-more") == SpanName(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", f"{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1"),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01\n", f" 00-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"),
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_what_names_no_span_is_none(text: str) -> None:
    assert parse(text) is None
