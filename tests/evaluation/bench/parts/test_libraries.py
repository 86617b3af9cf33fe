import pytest

from octavo.bench.parts import libraries


def test_weights_take_less_memory_than_the_library_does() -> None:
    _, (name, ours, theirs) = libraries.weights(64 << 20)
    assert name == "memory while they are read"
    # What the library maps counts as long as the machine has room for it.
    assert 60 < int(ours.removesuffix(" MiB")) <= min(100, int(theirs.removesuffix(" MiB")))


@pytest.mark.deep
def test_silent_clients_are_let_go_by_ours_alone() -> None:
    found = [*libraries.metrics(), *libraries.connections()]
    assert [(ours, theirs) for name, ours, theirs in found if "held" in name] == [("0", "50"), ("0", "50")]
