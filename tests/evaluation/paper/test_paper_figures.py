"""Figures are drawn as files that hold what was found, and the page says it as text."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.paper import __main__ as command
from octavo.paper.digits import DIGITS, Digit
from octavo.paper.figure import Figure, How, Kind, Panel, Results, Row, Series, Table, draw, read_results
from octavo.paper.figures import FIGURES
from octavo.paper.figures.blocks import BLOCK_SIZES, good_sizes
from octavo.paper.lab import Lab
from octavo.paper.measured import with_measured
from octavo.paper.page import page

ROOT = Path(__file__).parents[3]

CURVES = Panel(
    title="curves",
    x_label="rate",
    y_label="latency",
    series=[Series("vLLM", [0.1, 0.2], [1.0, 2.0]), Series("another", [0.3, 0.9], [1.0, 2.0])],
    x_log=True,
    y_log=True,
)
BARS = Panel(
    title="bars",
    x_label="",
    y_label="",
    kind=Kind.BARS,
    categories=["one", "two"],
    series=[Series("paper", [1.0, 2.0], paper=True), Series("ours", [1.125, 2.25])],
)
STACK = Panel(
    title="stack",
    x_label="",
    y_label="",
    kind=Kind.STACKED,
    categories=["one", "two"],
    series=[Series("tokens", [40.0, 60.0]), Series("waste", [60.0, 40.0])],
)
ROWS = [
    Row(digit="fig16/80", value=1.67 * 1.1, text="1.84×", how=How.SIMULATED, on="a model", why="a reason"),
    Row(digit="fig12/sharegpt/oracle", value=2.0, text="2.00×", how=How.SIMULATED, on="a model", why="a reason"),
    Row(digit="fig12/f", value=1.1, text="1.10×", how=How.MEASURED, on="a model", why="a reason"),
]
FIGURE = Figure(
    name="fig99",
    title="Figure 99: a title",
    notes=["A note."],
    panels=[CURVES, BARS, STACK],
    rows=ROWS,
    tables=[Table("More", ["a", "b"], [["1", "2"]])],
)


def test_a_figure_is_drawn_with_all_its_series(tmp_path: Path) -> None:
    svg, png = draw(FIGURE, tmp_path / "new")
    text = svg.read_text(encoding="utf-8")
    for expected in (
        "Figure 99",
        "curves",
        "bars",
        "stack",
        "vLLM",
        "another",
        "paper",
        "ours",
        "1.12",
        "2.25",
        "waste",
    ):
        assert f"{expected}" in text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    (one, _), (other, _) = draw(FIGURE, tmp_path / "one"), draw(FIGURE, tmp_path / "other")
    assert one.read_bytes() == other.read_bytes()


def test_the_page_has_every_digit_and_how_far_ours_is_from_it() -> None:
    lines = page(Results(quick=False, figures=[FIGURE])).splitlines()
    assert (
        "| 16 a | rate sustained over Orca (Oracle), prefix of 80 tokens | 1.67× | 1.84× | +10 % | simulated"
        in "\n".join(lines)
    )
    assert any("| 1.7 to 2.7× | 2.00× | within | simulated |" in line for line in lines)
    assert any("| less pronounced: compute-bound | 1.10× |  | measured |" in line for line in lines)
    assert "![Figure 99: a title](paper/fig99.svg)" in lines
    assert "A note." in lines
    assert "| 1 | 2 |" in lines


def test_a_quick_run_says_that_it_is_one() -> None:
    assert "quick run" in page(Results(quick=True, figures=[]))
    assert "quick run" not in page(Results(quick=False, figures=[]))


@pytest.mark.parametrize(
    ("digit", "ours", "expected"),
    [
        (Digit("1", "", 2.0), 3.0, 0.5),
        (Digit("1", "", 2.0, 4.0), 3.0, 0.0),
        (Digit("1", "", 2.0, 4.0), 1.0, -0.5),
        (Digit("1", "", 2.0, 4.0), 5.0, 0.25),
        (Digit("1", "", None, says="much"), 5.0, None),
    ],
)
def test_a_difference_is_that_from_the_nearest_of_the_papers(digit: Digit, ours: float, expected: float | None) -> None:
    assert digit.difference(ours) == expected


def test_every_digit_says_something() -> None:
    assert all(digit.text and digit.what and digit.figure for digit in DIGITS.values())
    assert DIGITS["fig12/sharegpt/max"].text == "2.7 to 8×"


def test_results_survive_their_file(tmp_path: Path) -> None:
    results = Results(quick=True, figures=[FIGURE])
    results.write(tmp_path / "new" / "results.json")
    assert read_results(tmp_path / "new" / "results.json") == results


def test_block_sizes_are_good_where_latency_is_near_the_least() -> None:
    latencies = [9.0, 5.0, 3.0, 2.0, 1.05, 1.0, 1.09, 1.2, 2.0]
    assert len(latencies) == len(BLOCK_SIZES)
    assert good_sizes(latencies) == "16 to 64"


def test_what_needs_no_simulation_comes_near_the_paper(tmp_path: Path) -> None:
    with Lab(tmp_path, quick=True) as lab:
        for name in ("table1", "fig11"):
            for row in FIGURES[name](lab).rows:
                assert row.value is not None
                difference = DIGITS[row.digit].difference(row.value)
                assert difference is not None
                assert abs(difference) < 0.03


def test_what_was_not_measured_is_said_to_be_not_run(tmp_path: Path) -> None:
    figures = [Figure(name=name, title=name) for name in FIGURES]
    rows = [row for figure in with_measured(Results(False, figures), tmp_path).figures for row in figure.rows]
    assert {DIGITS[row.digit].figure for row in rows} == {"15 b", "16 a", "18 a", "18 b", "19 a", "19 b"}
    assert {row.how for row in rows} == {How.NOT_RUN}


def test_a_quick_figure_is_simulated_drawn_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_BUILD", tmp_path)
    arguments = ["--quick", "--jobs", "1", "--only", "fig2", "--only", "table1"]
    ran = CliRunner().invoke(command.main, arguments)
    assert ran.exit_code == 0, ran.output
    docs = tmp_path / "quick"
    text = (docs / "paper.md").read_text(encoding="utf-8")
    assert "| 2 | KV memory that holds tokens, vLLM | 96.3 % |" in text
    assert "![Figure 2: what KV memory holds](paper/fig2.svg)" in text
    assert "FasterTransformer" in text
    assert (docs / "paper" / "fig2.png").exists()
    again = CliRunner().invoke(command.main, ["--quick", "--draw-only"])
    assert again.exit_code == 0, again.output
    assert (docs / "paper.md").read_text(encoding="utf-8") == text


def test_there_is_nothing_to_draw_before_anything_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_BUILD", tmp_path)
    ran = CliRunner().invoke(command.main, ["--quick", "--draw-only"])
    assert ran.exit_code == 1
    assert "nothing was simulated before" in ran.output


def test_other_figures_stay_where_only_some_are_run() -> None:
    old = Results(False, [Figure(name="fig2", title="old"), Figure(name="fig12", title="old")])
    new = Results(False, [Figure(name="fig12", title="new"), Figure(name="table1", title="new")])
    names = [(figure.name, figure.title) for figure in command.merged(new, old).figures]
    assert names == [("table1", "new"), ("fig2", "old"), ("fig12", "new")]


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    results = read_results(ROOT / "docs" / "paper" / "simulated.json")
    assert not results.quick
    names = [figure.name for figure in results.figures]
    assert names == list(FIGURES)
    complete = with_measured(results, ROOT / "docs" / "paper")
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == page(complete)
    for figure in complete.figures:
        assert (ROOT / "docs" / "paper" / f"{figure.name}.svg").exists() == bool(figure.panels)
