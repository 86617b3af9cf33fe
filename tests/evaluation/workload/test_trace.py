from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.workload.job import Job, TraceError, read_csv, write_csv

HEADER = "arrival_s,prompt_tokens,output_tokens"
JOBS = st.builds(
    Job,
    arrival_s=st.floats(0, 1e6),
    prompt_tokens=st.integers(10, 10_000),
    output_tokens=st.integers(1, 10_000),
    n=st.integers(1, 4),
    beam_width=st.sampled_from([0, 4, 6]),
    priority=st.integers(-100, 100),
    tenant=st.text('aé,;"', max_size=5),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


@given(jobs=st.lists(JOBS, min_size=1, max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_again(jobs: list[Job], trace: Path) -> None:
    write_csv(trace, jobs)
    assert read_csv(trace) == sorted(jobs, key=lambda job: job.arrival_s)


def test_a_shared_prefix_is_written_too(trace: Path) -> None:
    job = Job(0.25, 100, 5, prefix="few shots, translated", prefix_tokens=80)
    write_csv(trace, [job])
    assert read_csv(trace) == [job]


def test_three_columns_are_enough_in_any_order(trace: Path) -> None:
    trace.write_text("\ufeffoutput_tokens, prompt_tokens, arrival_s\n30,20,1.5\n\n31, 21, 0\n", encoding="utf-8")
    assert read_csv(trace) == [Job(0.0, 21, 31), Job(1.5, 20, 30)]


def test_an_empty_cell_is_the_default(trace: Path) -> None:
    trace.write_text(f"{HEADER},n,tenant\n0,2,3,,\n0,2,3,4,research\n")
    assert read_csv(trace) == [Job(0.0, 2, 3), Job(0.0, 2, 3, n=4, tenant="research")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: no column arrival_s and no column prompt_tokens and no column output_tokens"),
        ("arrival_s,output_tokens\n", r"line 1: no column prompt_tokens; found \['arrival_s', 'output_tokens'\]"),
        (f"{HEADER},colour\n", "line 1: column 'colour' is unknown; there are arrival_s, prompt_tokens"),
        (f"{HEADER},n,n\n", "line 1: column n is there twice"),
        (f"{HEADER}\n", "has no requests"),
        (f"{HEADER}\n0,1,2\n0,1\n", "line 3: 2 cells, where the header has 3 columns"),
        (f"{HEADER}\n0,1,2,3\n", "line 2: 4 cells"),
        (f"{HEADER}\n0,,2\n", "line 2, column prompt_tokens: it is empty"),
        (f"{HEADER}\n0,1.5,2\n", "line 2, column prompt_tokens: '1.5' is not a whole number"),
        (f"{HEADER}\nsoon,1,2\n", "line 2, column arrival_s: 'soon' is not a number"),
        (f"{HEADER}\n0,1,2\n-0.5,1,2\n", "line 3: arrival_s must be 0 or later, not -0.5"),
        (f"{HEADER}\nnan,1,2\n", "line 2: arrival_s must be 0 or later"),
        (f"{HEADER}\ninf,1,2\n", "line 2: arrival_s must be 0 or later"),
        (f"{HEADER}\n0,-1,2\n", "line 2: lengths must be at least 1 token, not -1 and 2"),
        (f"{HEADER}\n0,1,0\n", "line 2: lengths must be at least 1 token"),
        (f"{HEADER},prefix\n0,1,2,few\n", "line 2: a shared prefix needs both"),
        (f'{HEADER}\n0,1,"2\n', "line 3: this is no CSV file"),
    ],
)
def test_an_error_names_the_line_and_what_is_wrong(trace: Path, text: str, told: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match=told):
        read_csv(trace)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", f"{HEADER}\n0,1,2\n".encode() + b"0,1,\xff\n", b"\x00\x01,\x02"])
def test_a_file_that_is_no_text_is_an_error(trace: Path, content: bytes) -> None:
    trace.write_bytes(content)
    with pytest.raises(TraceError):
        read_csv(trace)


def test_a_file_that_is_not_there_is_the_systems_error(trace: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_csv(trace)
