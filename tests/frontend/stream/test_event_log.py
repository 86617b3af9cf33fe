"""What a request has told is kept small, and in order."""

from octavo.frontend.request.events import Emitted, Finished, FinishReason, Notice, TextDelta
from octavo.frontend.stream.stream import EventLog, PieceMark
from octavo.wire.requests import NoticeKind


def test_offsets_count_from_one() -> None:
    log = EventLog()
    piece, notice = TextDelta("a", [1]), Notice(NoticeKind.QUEUED, 2)
    assert [log.add(piece), log.add(notice), log.add(piece)] == [
        Emitted(1, piece),
        Emitted(2, notice),
        Emitted(3, piece),
    ]
    assert len(log) == 3


def test_a_piece_is_kept_as_its_place_and_length() -> None:
    log = EventLog()
    finished = Finished(FinishReason.LENGTH, None, index=15)
    log.add(TextDelta("text", [7, 8, 9], index=15))
    log.add(finished)
    log.add(TextDelta("x", [1] * (1 << 20), index=0))
    assert list(log.entries()) == [PieceMark(15, 3), finished, PieceMark(0, 1 << 20)]
