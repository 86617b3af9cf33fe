"""What stands in for what a request leaves out, and files that cannot say it."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.text.model_defaults import ModelDefaults, read_model_defaults
from octavo.runtime.models.directory import ModelDirectoryError
from octavo.testbed.tiny_model import END_TOKEN_ID, write_byte_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_byte_model(tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def recommend(model: Path, **generation: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps(generation))


def sampling(defaults: ModelDefaults) -> tuple[float, ...]:
    return tuple(defaults.sampling[name] for name in ("temperature", "top_p", "top_k", "min_p"))


NEUTRAL = (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("generation", "in_force"),
    [
        ({}, NEUTRAL),
        ({"eos_token_id": 2, "max_length": 20}, NEUTRAL),
        ({"do_sample": True}, (1.0, 1.0, 0, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, (0.6, 1.0, 20, 0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, (0.0, 0.9, 0, 0.0)),
        ({"temperature": 0.6, "top_p": 0.9}, (0.6, 0.9, 0, 0.0)),
        ({"top_p": 0.9, "min_p": 0.1, "temperature": None}, (1.0, 0.9, 0, 0.1)),
        ({"do_sample": None, "temperature": None}, NEUTRAL),
    ],
)
def test_sampling_is_what_the_model_recommends(
    model: Path, generation: dict[str, Any], in_force: tuple[float, float, int, float]
) -> None:
    recommend(model, **generation)
    assert sampling(read_model_defaults(model)) == in_force


@pytest.mark.parametrize(
    ("generation", "recommends"),
    [
        ({}, False),
        ({"eos_token_id": 2}, False),
        ({"do_sample": None, "temperature": None}, False),
        ({"do_sample": False}, True),
        ({"top_p": 0.9}, True),
    ],
)
def test_it_is_known_whether_a_model_recommends_a_way_to_choose(
    model: Path, generation: dict[str, Any], recommends: bool
) -> None:
    recommend(model, **generation)
    assert read_model_defaults(model).recommends_sampling == recommends
    assert not read_model_defaults(model, "none").recommends_sampling


def test_without_a_recommendation_nothing_is_cut_or_penalised(model: Path) -> None:
    (model / "generation_config.json").unlink()
    defaults = read_model_defaults(model)
    assert (*sampling(defaults), defaults.sampling["repetition_penalty"], defaults.max_new_tokens) == (
        *NEUTRAL,
        1.0,
        None,
    )


def test_lengths_penalties_and_every_eos_are_read_too(model: Path) -> None:
    recommend(model, eos_token_id=[3, 4], repetition_penalty=1.1, max_new_tokens=64)
    defaults = read_model_defaults(model)
    assert defaults.eos_token_ids == {3, 4}
    assert (defaults.sampling["repetition_penalty"], defaults.max_new_tokens) == (1.1, 64)


def test_an_operator_may_want_none_of_it_but_the_end_stays_the_end(model: Path) -> None:
    recommend(model, eos_token_id=[3, 4], do_sample=True, temperature=0.6, repetition_penalty=1.1, max_new_tokens=64)
    defaults = read_model_defaults(model, "none")
    assert (*sampling(defaults), defaults.sampling["repetition_penalty"], defaults.max_new_tokens) == (
        *NEUTRAL,
        1.0,
        None,
    )
    assert defaults.eos_token_ids == {3, 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", "0.9"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("temperature", [1]),
        ("repetition_penalty", 2.5),
        ("repetition_penalty", True),
        ("max_new_tokens", 0),
    ],
)
def test_a_default_that_no_request_may_have_is_refused(model: Path, name: str, value: object) -> None:
    recommend(model, **{"do_sample": True, name: value})
    with pytest.raises(ModelDirectoryError) as caught:
        read_model_defaults(model)
    assert f"has a {name} of {value!r}, but it must be" in str(caught.value)


def test_eos_comes_from_the_config_where_no_generation_config_says(model: Path) -> None:
    (model / "generation_config.json").unlink()
    assert read_model_defaults(model).eos_token_ids == {END_TOKEN_ID}


@pytest.mark.parametrize("eos", [258, -1, "</s>", [1, 258]])
def test_an_eos_outside_the_vocabulary_is_refused(model: Path, eos: object) -> None:
    recommend(model, eos_token_id=eos)
    with pytest.raises(ModelDirectoryError, match=r"has an eos_token_id of .*, but its vocabulary ends at 257"):
        read_model_defaults(model)


@pytest.mark.parametrize("name", ["max_position_embeddings", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "many", -1])
def test_a_config_without_usable_sizes_is_refused(model: Path, name: str, value: object) -> None:
    edit(model / "config.json", **{name: value})
    with pytest.raises(ModelDirectoryError, match=rf"config\.json.*{name}"):
        read_model_defaults(model)


def test_sizes_that_a_family_leaves_out_are_those_of_transformers(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "gpt2", "n_positions": 96, "eos_token_id": 7}')
    (model / "generation_config.json").unlink()
    defaults = read_model_defaults(model)
    assert (defaults.max_model_len, defaults.vocab_size) == (96, 50257)
    assert defaults.eos_token_ids == {7}
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_model_defaults(model).max_model_len == 1024


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "why"), [("{", "cannot read"), ("[]", "holds no JSON object")])
def test_a_broken_file_is_named(model: Path, name: str, text: str, why: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(ModelDirectoryError, match=why) as caught:
        read_model_defaults(model)
    assert str(model / name) in str(caught.value)


def test_code_that_a_directory_names_has_no_part_in_it(model: Path) -> None:
    (model / "code.py").write_text("raise SystemExit('run')")
    (model / "config.json").write_text('{"model_type": "gpt2", "auto_map": {"AutoConfig": "code.Config"}}')
    assert read_model_defaults(model).vocab_size == 50257


@pytest.mark.parametrize("part", [None, {}])
def test_a_text_config_without_content_is_none(model: Path, part: object) -> None:
    expected = read_model_defaults(model)
    edit(model / "config.json", text_config=part)
    assert read_model_defaults(model) == expected


def test_a_text_config_of_another_kind_is_refused(model: Path) -> None:
    edit(model / "config.json", text_config=["x"])
    with pytest.raises(ModelDirectoryError, match=r"config\.json has a text_config that is no JSON object"):
        read_model_defaults(model)
