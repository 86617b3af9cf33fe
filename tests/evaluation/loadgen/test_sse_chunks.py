from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.loadgen.http_transport import ChunkReader, Lines, decode_chunk, error_of
from octavo.loadgen.servers import AnswerRecorder, Failure, Record
from octavo.workload.job import Job
from octavo.workload.measures import Gaps

STREAM = b': ping\r\ndata: {"a":1}\r\n\r\nevent: x\nid: 7\ndata:{"b":"\xc3\xa4"}\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=6))
def test_payloads_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    lines = Lines()
    places = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[start:end] for start, end in pairwise(places)]
    assert [payload for part in parts for payload in lines.feed(part)] == [b'{"a":1}', b'{"b":"\xc3\xa4"}']
    assert lines.done


def read(*chunks: bytes, n: int = 1) -> tuple[Record, ChunkReader]:
    record = Record(Job(0.0, 4, 4, n=n))
    reader = ChunkReader(AnswerRecorder(record, Gaps(), lambda: 1.0), n)
    for chunk in chunks:
        reader.read(decode_chunk(chunk))
    return record, reader


@pytest.mark.parametrize(
    ("chunk", "tokens"),
    [
        (b'{"choices":[{"index":0,"text":"a b"}]}', 1),
        (b'{"choices":[{"index":0,"text":""}]}', 0),
        (b'{"choices":[{"index":0,"text":"","token_ids":[4,5]}]}', 2),
        (b'{"choices":[{"index":0,"text":"a","token_ids":[]}]}', 0),
        (b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}', 0),
        (b'{"choices":[{"index":0,"delta":{"content":"a"}}]}', 1),
        (b'{"choices":[{"index":0,"delta":{"reasoning_content":"a"}}]}', 1),
        (b'{"choices":[],"usage":null,"unknown":{"x":[1]}}', 0),
        (b'{"choices":[{"index":0,"message":{"content":"all of it"},"finish_reason":"stop"}]}', 1),
    ],
)
def test_a_chunk_brings_as_many_tokens_as_it_shows(chunk: bytes, tokens: int) -> None:
    record, _ = read(chunk)
    assert record.num_tokens == tokens
    assert (record.first_token_s is not None) == (tokens > 0)


def test_the_usage_decides_at_the_end() -> None:
    usage = (
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}'
    )
    record, reader = read(b'{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}', usage)
    reader.end()
    assert (record.num_tokens, record.prompt_tokens, record.cached_tokens) == (9, 7, 4)


def test_it_is_complete_when_every_sequence_has_ended() -> None:
    end = b'{"choices":[{"index":%d,"text":"a","finish_reason":"stop"}]}'
    assert not read(end % 0, n=2)[1].complete
    assert read(end % 0, end % 1, n=2)[1].complete


@pytest.mark.parametrize(
    ("body", "kind", "detail"),
    [
        (b'{"error":{"message":"no room","code":"queue_full"}}', "HTTP 429 queue_full", "no room"),
        (b'{"error":{"message":"no room","code":429}}', "HTTP 429", "no room"),
        (b'{"error":"no room"}', "HTTP 429", "no room"),
        (b'{"object":"error","message":"no room","code":"429"}', "HTTP 429", "no room"),
        (b'{"detail":"Not Found"}', "HTTP 429", "Not Found"),
        (b"<html>no room</html>", "HTTP 429", "<html>no room</html>"),
        (b"\xff\xfe", "HTTP 429", "\ufffd\ufffd"),
    ],
)
def test_errors_of_every_form_have_a_kind_and_a_detail(body: bytes, kind: str, detail: str) -> None:
    assert error_of(body, "HTTP 429") == (kind, detail)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b'{"error":{"message":"it broke","code":"worker_lost"}}', "error in the stream worker_lost"),
        (b'{"object":"error","message":"it broke","code":500}', "error in the stream"),
        (b'{"choices":', "unreadable answer"),
        (b'{"choices":[{"index":"zero"}]}', "unreadable answer"),
        (b'"\xff"', "unreadable answer"),
    ],
)
def test_what_is_no_chunk_is_a_failure(payload: bytes, kind: str) -> None:
    with pytest.raises(Failure) as caught:
        decode_chunk(payload)
    assert caught.value.kind == kind
