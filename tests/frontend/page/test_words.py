"""The page, and the operator's commands, have words for all that the scheduler can say."""

import re
from collections.abc import Iterable
from importlib.resources import files

import pytest

from octavo.frontend.page import routes
from octavo.scheduler.cli import operate
from octavo.scheduler.core.admission import ObstacleKind
from octavo.scheduler.core.lookups.history import MissReason
from octavo.scheduler.core.sequence import SequenceStatus, Tier
from octavo.scheduler.server import admin_messages
from octavo.v1 import admin_pb2 as pb


def script(name: str) -> str:
    return files(routes.__package__).joinpath("static", f"{name}.js").read_text(encoding="utf-8")


def keys(name: str, table: str) -> list[str]:
    """The keys of an object that a script of the page declares."""
    found = re.search(rf"const {table} = \{{\n(.*?)\n\}};", script(name), flags=re.DOTALL)
    assert found, f"{name}.js declares no {table}"
    return re.findall(r"^  (\w+):", found[1], flags=re.MULTILINE)


def told(names: Iterable[str], prefix: str) -> set[str]:
    """The values of an enumeration as the page gets them."""
    return {name.removeprefix(prefix).lower() for name in names} - {"unspecified"}


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (("explanation", "OBSTACLES"), told(pb.Obstacle.Kind.keys(), "KIND_")),
        (("explanation", "MISSES"), told(pb.CacheLookup.Reason.keys(), "REASON_")),
        (("tiers", "TIERS"), told(pb.Tier.keys(), "TIER_")),
    ],
)
def test_the_page_has_words_for_all_that_is_told(table: tuple[str, str], names: set[str]) -> None:
    words = keys(*table)
    assert len(words) == len(set(words))
    assert set(words) == names


def test_all_that_the_core_names_is_told() -> None:
    assert set(admin_messages._KINDS) == set(ObstacleKind)
    assert set(admin_messages._MISS_REASONS) == set(MissReason)
    assert set(admin_messages._TIERS) == set(Tier)
    assert set(admin_messages._STATES) == set(SequenceStatus) - {SequenceStatus.FINISHED}
    tables: list[tuple[dict[str, int], Iterable[int]]] = [
        (dict(pb.Obstacle.Kind.items()), admin_messages._KINDS.values()),
        (dict(pb.CacheLookup.Reason.items()), admin_messages._MISS_REASONS.values()),
        (dict(pb.Tier.items()), admin_messages._TIERS.values()),
    ]
    for declared, used in tables:
        assert sorted(used) == sorted(set(declared.values()) - {0}), "each value is told, and stands for one thing"


def test_commands_have_words_for_all_that_is_told() -> None:
    assert set(operate._REASONS) == set(pb.Obstacle.Kind.values()) - {0}
    assert set(operate._MISSES) == set(pb.CacheLookup.Reason.values()) - {0}


def test_what_is_found_is_told_by_tier() -> None:
    counted = {field.name for field in pb.CacheLookup.DESCRIPTOR.fields if field.name.endswith("_tokens")}
    # Beside the tiers of the worker's own cache there is what it has copied from another.
    assert counted == {f"{tier}_tokens" for tier in [*Tier, "replica"]}
    told = pb.CacheLookup(tokens=99, replica_tokens=7, source="worker-b")
    for count, tier in enumerate(Tier, start=11):
        setattr(told, f"{tier}_tokens", count)
    line = next(iter(operate.cache_lines(told)))
    assert all(f"{count} " in line for count in range(11, 11 + len(Tier))), line
    assert "7 on worker-b" in line
    assert f"{7 + sum(range(11, 11 + len(Tier)))} of 99" in line


def test_every_state_of_a_block_has_a_name_and_a_colour() -> None:
    named = re.findall(r'\{ name: "(\w*)", light: "(#\w{6})?", dark: "(#\w{6})?" \}', script("states"))
    assert [name for name, _, _ in named][1:] == [
        name.removeprefix("BLOCK_STATE_").lower() for name in pb.BlockState.keys()[1:]
    ]
    colours = [colour for _, *both in named[1:] for colour in both]
    assert len(set(colours)) == len(colours)
    assert "" not in colours


def test_every_state_of_a_request_has_its_group() -> None:
    held = told(pb.RequestState.keys(), "REQUEST_STATE_") - {"ended"}
    found = re.search(r"const GROUPS = \[(.*?)\];", script("requests"))
    assert found
    assert set(re.findall(r'"(\w+)"', found[1])) == held
