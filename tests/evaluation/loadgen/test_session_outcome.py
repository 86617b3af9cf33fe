import msgspec

from octavo.loadgen.report import make_outcome, outcome_text
from octavo.loadgen.servers import Asking, Record, Secrets, ServerAddress
from octavo.loadgen.session import LoadRun, Side
from octavo.workload.job import Job


def run(latency_s: float, *, interrupted: bool = False) -> LoadRun:
    record = Record(Job(0.0, 4, 2), sent_s=0.0, first_token_s=0.1, finished_s=latency_s, num_tokens=2, deliveries=2)
    return LoadRun([record], seconds=latency_s, interrupted=interrupted)


def side(port: int, *runs: LoadRun) -> Side:
    return Side(ServerAddress("grpc", f"h:{port}"), Asking(), Secrets("a-secret-key"), "m", list(runs))


def test_only_whole_rounds_of_both_are_compared() -> None:
    outcome = make_outcome([side(1, run(1.0), run(1.0)), side(2, run(3.0), run(9.0, interrupted=True))], None, 7)
    assert {ratio.metric: ratio.high for ratio in outcome.ratios}["latency_p50"] == 3.0
    assert [len(measured.rounds) for measured in outcome.servers] == [2, 2]


def test_a_server_without_a_run_is_left_out() -> None:
    outcome = make_outcome([side(1, run(1.0)), side(2)], None, 7)
    assert ([measured.server for measured in outcome.servers], outcome.ratios) == (["grpc://h:1"], [])
    assert outcome_text(outcome).startswith("grpc://h:1, model m\n1 of 1 requests finished")


def test_two_servers_have_their_names_and_their_ratios() -> None:
    text = outcome_text(make_outcome([side(1, run(1.0)), side(2, run(2.0))], None, 7))
    assert [block.split("\n")[0].split()[0] for block in text.split("\n\n")] == ["A:", "B:", "B"]


def test_no_secret_is_in_what_is_written() -> None:
    document = msgspec.json.encode(make_outcome([side(1, run(1.0))], None, 7))
    assert b"a-secret-key" not in document
    assert msgspec.json.decode(document)["servers"][0]["report"]["summary"]["finished"] == 1
