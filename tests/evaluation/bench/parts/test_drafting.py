import json
from pathlib import Path

import pytest

from octavo.bench.parts import drafting
from octavo.bench.parts.recorded_answers import CURVES, Curve, Played, RecordedReplica, recordings


def test_code_is_guessed_and_random_tokens_are_not() -> None:
    repeated = 20 * list(range(100))
    code, noise = drafting.text_cost("code", repeated), drafting.text_cost("noise", list(range(2000)))
    assert code.guessed_share > 0.9
    assert noise.guessed_share == 0.0
    for cost in (code, noise):
        assert min(cost.indexed_at_once_us, cost.indexed_one_by_one_us, cost.proposal_us) > 0.0
        assert 8.0 <= cost.index_bytes <= 12.0


def test_the_share_of_drafts_is_that_of_all_work_of_a_step() -> None:
    assert drafting.StepCost("code", 1, 20.0, 30.0, 50.0).share == 0.2


def test_the_command_prints_a_line_for_each_text_and_each_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "costs.json"
    sizes = ["--tokens", "2000", "--sequences", "2", "3"]
    played = ["--play", "random", "json", "--played", "1", "2"]
    assert drafting.main([*sizes, *played, "--no-worker", "--json", str(written)]) == 0
    texts, steps, answers = capsys.readouterr().out.split("\n\n")
    kinds = ["code", "prose", "random"]
    assert [line.split()[0] for line in texts.splitlines()[1:]] == kinds
    assert [line.split()[:2] for line in steps.splitlines()[1:]] == [[k, n] for n in ("2", "3") for k in kinds]
    found = json.loads(written.read_text())
    assert [len(found["texts"]), len(found["steps"]), len(found["played"])] == [3, 6, 4]
    assert [line.split()[:2] for line in answers.splitlines()[1:]] == [[k, n] for k in played[1:3] for n in ("1", "2")]


def play(kind: str, count: int, curve: Curve = CURVES["flat"]) -> dict[str, Played]:
    words: dict[str, int] = {}
    recorded = recordings(kind, count, lambda text: [words.setdefault(word, len(words)) for word in text.split()])
    return {setting: RecordedReplica(recorded, setting, curve).play() for setting in ("off", "auto")}


def test_recorded_answers_that_copy_come_in_fewer_steps_and_are_as_long() -> None:
    off, auto = play("json", 3).values()
    assert auto.tokens == off.tokens
    assert (off.spent, auto.spent >= auto.guessed) == (0, True)
    assert auto.guessed > off.tokens / 2
    assert auto.seconds < off.seconds / 2


def test_recorded_answers_that_repeat_nothing_take_the_same_steps() -> None:
    off, auto = play("random", 3).values()
    assert (auto.steps, auto.tokens, auto.spent) == (off.steps, off.tokens, 0)


def test_more_tokens_than_there_are_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docs/page.md", "proto/octavo/module.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("a = 1\n", encoding="utf-8")
    # All of this repository would be tokenized.
    monkeypatch.setattr(drafting, "_ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"the files have (\d+) tokens; give --tokens \1 or fewer"):
        drafting.main(["--tokens", "1000000000", "--no-worker"])
