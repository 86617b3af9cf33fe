"""A token picked from a whole row: what a sort of it would give."""

from math import inf, log

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.worker.sampling import draw
from octavo.worker.sampling.draw import Floats, pick_ranked

SIZE = 3000
UNIFORMS = [0.0, 1e-9, 0.1, 0.5, 0.77, 0.999, 1 - 2**-53]


def scaled_rows() -> dict[str, Floats]:
    random = np.random.default_rng(0)
    normal = random.normal(size=SIZE)
    ruled_out = np.where(random.random(SIZE) < 0.99, -inf, normal)
    rows = {
        "flat": normal / 50,
        "normal": 2 * normal,
        "peaked": 200 * normal,
        "ties": np.round(3 * normal) / 2,
        "equal": np.zeros(SIZE),
        "ruled out": ruled_out,
        "at the edges of buckets": -np.arange(SIZE) / 64,
    }
    return {name: (row - row.max()).astype(np.float32) for name, row in rows.items()}


def likelihoods(scaled: Floats) -> npt.NDArray[np.float64]:
    """As the sampler has them: in fp32, rounded alike on every CPU."""
    found: npt.NDArray[np.float64] = draw._exponentials(torch.from_numpy(scaled)[None])[0].numpy()
    return found


def by_sorting(scaled: Floats, top_k: int, least: float, top_p: float, whole: float, uniform: float) -> int:
    order = np.argsort(-scaled, kind="stable")[:top_k]
    order = order[scaled[order] >= least]
    masses = likelihoods(scaled)[order]
    ends = masses.cumsum()
    kept = ends[min(int(ends.searchsorted(top_p * (whole if whole < inf else ends[-1]))), len(ends) - 1)]
    return int(order[ends.searchsorted(min(uniform * kept, np.nextafter(kept, 0)), side="right")])


@pytest.mark.parametrize("name", scaled_rows())
@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p"),
    [
        (SIZE, 0.0, 0.9),
        (SIZE, 0.0, 0.3),
        (SIZE, 0.0, 1 - 1e-9),
        (SIZE, 0.0, 1e-9),
        (SIZE, 0.05, 1.0),
        (SIZE, 1.0, 1.0),
        (SIZE, 0.01, 0.8),
        (100, 0.0, 1.0),
        (100, 0.0, 0.5),
        (1, 0.0, 1.0),
        (1600, 0.0, 0.95),
        (100, 0.2, 0.7),
    ],
)
def test_the_token_is_that_of_the_sorted_row(name: str, top_k: int, min_p: float, top_p: float) -> None:
    scaled = scaled_rows()[name]
    least = float(np.float32(log(min_p))) if min_p else -inf
    whole = inf if top_k < SIZE or min_p else float(likelihoods(scaled).sum())
    found = [pick_ranked(scaled, top_k, least, top_p, whole, uniform) for uniform in UNIFORMS]
    assert found == [by_sorting(scaled, top_k, least, top_p, whole, uniform) for uniform in UNIFORMS]


@pytest.mark.parametrize("top_k", [1, 7, 180])
def test_what_is_left_out_at_once_is_never_among_the_first(top_k: int) -> None:
    for scaled in scaled_rows().values():
        bound = draw._bound(scaled, top_k, 1.0, inf)
        assert bound <= np.sort(scaled)[-top_k]
    assert (scaled_rows()["normal"] >= draw._bound(scaled_rows()["normal"], top_k, 1.0, inf)).sum() < 3 * top_k


def test_only_the_buckets_at_the_cuts_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    argsort, lengths = np.argsort, list[int]()

    def counted(values: Floats, kind: None) -> np.typing.NDArray[np.int64]:
        lengths.append(len(values))
        return argsort(values, kind=kind)

    monkeypatch.setattr(np, "argsort", counted)
    pick_ranked(scaled_rows()["normal"], SIZE, -inf, 0.9, 4e4, 0.5)
    assert 0 < sum(lengths) < SIZE / 20
