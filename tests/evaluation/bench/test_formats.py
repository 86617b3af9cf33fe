"""Formats of weights: their names, their sizes, and who serves them."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from octavo.bench.figures import LinearShapes
from octavo.bench.formats import NAMES, file_bytes, read_format
from octavo.bench.systems import Bench

SHAPES = LinearShapes(2, [(6, 32), (4, 32)], (8, 32))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_read(name: str) -> None:
    assert read_format(name).name == name


def test_a_format_with_another_kv_cache_is_the_same_to_peers() -> None:
    plain, narrow = read_format("q8_0"), read_format("q8_0/int8")
    assert narrow.settings == {**(plain.settings or {}), "kv_cache_dtype": "int8"}
    assert (narrow.gguf, narrow.openvino) == (plain.gguf, plain.openvino) == ("Q8_0", "int8")


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no format 'q9'; there are bf16, .*, q4_k_m"):
        read_format("q9/int8")


def test_a_format_is_as_large_as_its_layers_and_its_head() -> None:
    # 2 * 10 * 32 = 640 weights in the layers and 256 in the head; scales are half a bit of each weight.
    assert read_format("bf16").weight_bytes(SHAPES) == 2 * 896
    assert read_format("q8_0").weight_bytes(SHAPES) == (640 + 256) * 8.5 / 8
    assert read_format("q4_0").weight_bytes(SHAPES) == 640 * 4.5 / 8 + 256 * 8.5 / 8


@pytest.mark.parametrize(("has_head", "expected"), [(False, 2 * 34 + 4 * 34), (True, 2 * 34 + 4 * 64)])
def test_of_a_file_its_matrices_count_but_for_rows_that_are_looked_up(
    has_head: bool, expected: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, np.float32))
    if has_head:
        writer.add_tensor("output.weight", np.zeros((4, 32), np.float16))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert file_bytes(path) == expected


def test_what_only_a_file_has_is_not_served_without_who_makes_it(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench, pytest.raises(ValueError, match="q4_k_m is a GGUF file's alone"):
        bench.alone(1, read_format("q4_k_m"))
