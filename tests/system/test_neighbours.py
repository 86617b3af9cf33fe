"""A neighbour of hostile inputs is served all the while; `make fuzz ARGS="--surface neighbours"` measures how well."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.chaos.fuzz.neighbour import AttackedServer, NeighbourBounds, Seen, judged, percentile, row
from octavo.chaos.fuzz.neighbours import beside, served
from octavo.testbed.tiny_model import write_byte_model

pytestmark = pytest.mark.system

# So long nobody waits on any machine, unless something stands still.
LOOSE = NeighbourBounds(30.0, 60.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    model = tmp_path_factory.mktemp("model") / "byte-model"
    write_byte_model(model, max_model_len=2048)
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory, served(model, Path(directory)) as (_, target):
        yield target


def test_ambiguous_grammars_wait_for_their_turns_and_the_neighbour_does_not(target: AttackedServer) -> None:
    seen, answers = asyncio.run(beside(target, "ambiguous_grammars", 0.4, 0.0))
    assert not judged(seen, LOOSE), row("ambiguous_grammars", seen, [])
    assert answers["200"] == 16
    # They have 90 tokens each. In steps that all of them share, it would have hardly more.
    assert seen.num_tokens > 2 * 90


def test_large_answers_are_whole_and_the_neighbour_is_served_beside_them(target: AttackedServer) -> None:
    seen, answers = asyncio.run(beside(target, "large_chats", 0.03, 0.0))
    assert not judged(seen, LOOSE), row("large_chats", seen, [])
    assert answers == {"200": 4}


def test_what_a_neighbour_must_not_suffer_is_told() -> None:
    bounds = NeighbourBounds(p99_gap=0.1, livez=0.5)
    assert judged(Seen(gaps=[0.01] * 200, livez=[0.4]), bounds) == []
    assert judged(Seen(gaps=[0.01] * 90 + [0.2] * 10, livez=[0.4]), bounds) == ["the p99 gap between tokens was 200 ms"]
    assert judged(Seen(gaps=[0.01] * 9, livez=[0.4, 0.6]), bounds) == ["/livez took 600 ms"]
    assert judged(Seen(gaps=[0.01] * 9, livez=[0.4], wrong=["lost"]), bounds) == ["lost"]
    # Who has seen nothing was not served.
    assert len(judged(Seen(), bounds)) == 2
    assert percentile([], 99) == float("inf")
