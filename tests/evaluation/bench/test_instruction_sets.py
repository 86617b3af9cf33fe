"""The table that sets every instruction set beside torch."""

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.bench import instruction_sets
from octavo.bench.instruction_sets import contenders, runnable, table
from octavo.kernels.native.library import VARIANT_VARIABLE
from octavo.testing.native import loaded

EVERYTHING = ["amx", "avx512_bf16", "avx512", "avx2", "portable"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    loaded()
    monkeypatch.setattr(instruction_sets, "runnable", lambda _: request.param)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", [EVERYTHING, EVERYTHING[3:], EVERYTHING[4:]], indirect=True)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_contender_is_another_process_and_comes_after_its_torch(bf16: bool) -> None:
    several = contenders(bf16=bf16)
    names = [one.name for one in several]
    assert names[0] == "torch"
    assert "portable" in names
    for place, one in enumerate(several):
        assert one.environment[VARIANT_VARIABLE] == (one.name if one.peer else "none")
        assert bf16 or not one.peer or one.peer in names[:place]
    assert len({tuple(sorted(one.environment.items())) for one in several}) == len(several)


def test_the_chosen_variant_is_chosen_again() -> None:
    library = loaded()
    found = runnable(library.functions)
    assert found[-1] == "portable"
    assert library.functions.octavo_choose(None).decode() == found[0]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", [EVERYTHING], indirect=True)
def test_the_table_tells_how_many_times_as_fast_as_torch_each_is() -> None:
    several = contenders(bf16=False)
    seconds = {one.name: 2.0 for one in several} | {"avx2": 0.5, "torch, AVX2": 4.0}
    runs: Any = {name: SimpleNamespace(best=lambda _, value=value: value) for name, value in seconds.items()}
    figure: Any = SimpleNamespace(
        case="a", name="first token", unit="ms", seconds=lambda run: run, shown=lambda value, _: 1000 * value
    )
    work: Any = {"a": SimpleNamespace(case=None)}
    lines = list(table(several, work, [figure], runs))
    assert len(lines) == 1 + len(several)
    assert lines[1].split() == ["a,", "first", "token", "torch", "2000.0", "ms", "1.00"]
    [avx2] = [line.split() for line in lines if line.split()[0] == "avx2"]
    assert avx2 == ["avx2", "500.0", "ms", "8.00", "4.00"]
