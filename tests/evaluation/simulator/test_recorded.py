"""The requests of an event log come back as jobs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import SequenceEnded
from octavo.scheduler.server.event_log import EventLogError, log_file, recorder
from octavo.simulator.recorded import jobs_of_log
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, resubmitted, write_fake_model
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.workload.job import Job

MakeLogged = Callable[..., Cluster]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events"


@pytest.fixture
def make_logged(tmp_path: Path, log: Path) -> Iterator[MakeLogged]:
    """A cluster that writes `log`, with one replica."""
    directory = write_fake_model(tmp_path / "model")
    with log.open("wb", buffering=0) as file:

        def make(**config: Any) -> Cluster:
            cluster = Cluster(directory, record=recorder(log_file(file)), **config)
            cluster.join(1, num_blocks=24, block_size=4)
            return cluster

        yield make


def test_jobs_come_when_requests_came_with_the_lengths_they_had(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    cluster.now = 100.0
    cluster.submit(make_request("one", 7, 5, priority=2, tenant="research"))
    cluster.step()
    cluster.now = 101.5
    cluster.submit(make_request("two", 9, 3, num_sequences=2, temperature=1.0))
    cluster.submit(make_request("three", 4, 4, num_sequences=2, beam=BeamSearch(3, 1.0, EarlyStopping.OFF)))
    cluster.run()
    assert jobs_of_log(log) == [
        Job(0.0, 7, 5, priority=2, tenant="research"),
        Job(1.5, 9, 3, n=2),
        Job(1.5, 4, 4, n=2, beam_width=3),
    ]


def test_an_output_that_stopped_early_is_as_long_as_it_came(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    tokens = reference_tokens(make_request("one", 7, 12))
    stop = next(token for place, token in enumerate(tokens) if place > 2 and token not in tokens[:place])
    cluster.submit(make_request("one", 7, 12, stop_token_ids=(stop,)))
    cluster.run()
    (job,) = jobs_of_log(log)
    assert job.output_tokens == len(cluster.tokens["one"]) == tokens.index(stop) + 1


def test_an_output_that_its_client_ended_is_as_long_as_it_came(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    cluster.submit(make_request("aborted", 7, 12), make_request("stopped", 7, 12))
    for _ in range(3):
        cluster.step()
    cluster.abort("aborted")
    cluster.handle(SequenceEnded(FRONTEND, "stopped", 1, 0))
    cluster.run()
    assert [job.output_tokens for job in jobs_of_log(log)] == [len(cluster.tokens[each]) for each in cluster.tokens]
    assert all(0 < job.output_tokens < 12 for job in jobs_of_log(log))


def test_an_output_whose_end_is_not_in_the_log_is_as_long_as_it_may_be(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    cluster.submit(make_request("under way", 7, 12))
    cluster.step()
    cluster.submit(make_request("aborted before its first token", 7, 9))
    cluster.abort("aborted before its first token")
    assert [job.output_tokens for job in jobs_of_log(log)] == [12, 9]


def test_a_replay_is_no_second_job_and_goes_on_with_the_first(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    request = make_request("one", 7, 12)
    cluster.submit(request)
    for _ in range(4):
        cluster.step()
    cluster.submit(resubmitted(request, cluster.tokens["one"]))
    cluster.run()
    assert jobs_of_log(log) == [Job(0.0, 7, 12)]


def test_what_came_before_the_log_began_is_no_job(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    cluster.submit(resubmitted(make_request("old", 7, 12), [1, 2, 3]), make_request("new", 8, 4))
    cluster.run()
    assert jobs_of_log(log) == [Job(0.0, 8, 4)]


def test_a_refusal_for_want_of_room_is_a_job_and_one_for_good_is_none(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged(max_waiting=1)
    cluster.submit(make_request("never fits", 90, 20), make_request("one", 8, 4), make_request("queue full", 9, 5))
    cluster.run()
    assert set(cluster.rejected) == {"never fits", "queue full"}
    assert jobs_of_log(log) == [Job(0.0, 8, 4), Job(0.0, 9, 5)]


def test_prompts_that_begin_alike_share_a_prefix(make_logged: MakeLogged, log: Path) -> None:
    cluster = make_logged()
    for name, shared, salt in [("a", 20, ""), ("b", 20, ""), ("alone", 0, ""), ("salted", 20, "s"), ("short", 15, "")]:
        cluster.submit(make_request(name, 24, 2, shared=shared, salt=salt))
        cluster.run()
    prefixes = [(job.prefix, job.prefix_tokens) for job in jobs_of_log(log)]
    assert prefixes == [("request-0", 20), ("request-0", 20), ("", 0), ("", 0), ("", 0)]


def test_the_first_of_a_family_shares_as_much_as_any_other_does(make_logged: MakeLogged, log: Path) -> None:
    def asks(request_id: str, prompt: list[int]) -> Request:
        return msgspec.structs.replace(make_request(request_id, 1, 2), prompt_token_ids=prompt)

    cluster = make_logged()
    turns = [asks("one", [*range(18)]), asks("two", [*range(16), 99]), asks("three", [*range(18), 50, 51])]
    for request in turns:
        cluster.submit(request)
        cluster.run()
    assert [job.prefix_tokens for job in jobs_of_log(log)] == [18, 16, 18]


def test_a_log_without_requests_has_no_jobs(make_logged: MakeLogged, log: Path) -> None:
    make_logged().step()
    assert jobs_of_log(log) == []


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x00\x04nope", b"arrival_s,prompt_tokens\n"])
def test_a_file_that_is_no_log_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(EventLogError):
        jobs_of_log(tmp_path / "file")


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        jobs_of_log(tmp_path / "nowhere")
