"""GGUF files that lie: each is refused in one sentence, before memory is taken for what is not there."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.runtime.models.gguf.families import config_of
from octavo.runtime.models.gguf.file import TYPES, GGUFError, GGUFFile, UnsupportedGGUF, read_gguf
from octavo.runtime.models.gguf.metadata import Metadata
from octavo.runtime.models.gguf.tokenizer import GGUFTokenizer
from octavo.testing.small.tiny_gguf import write_gguf

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
HUGE = (1 << 32) + 5


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    keys: list[bytes],
    entries: list[bytes],
    data: bytes = b"",
    *,
    head: bytes = b"GGUF" + struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = counts or (len(entries), len(keys))
    content = head + struct.pack("<QQ", num_tensors, num_keys) + b"".join(keys) + b"".join(entries)
    return content + bytes(-len(content) % 32) + data


ONE = [entry("a", (4,), 0, 0)]
SIXTEEN = bytes(16)
LIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it has 0 bytes"),
    "another format": (b"PK\x03\x04" + bytes(100), r"begins with b'PK\\x03\\x04'"),
    "the first version": (file_of([], [], head=b"GGUF" + struct.pack("<I", 1)), "it is of version 1, and versions 2"),
    "big-endian": (file_of([], [], head=b"GGUF" + struct.pack(">I", 3)), "its numbers are big-endian"),
    "a billion tensors": (file_of([], [], counts=(10**9, 0), data=bytes(99)), "announces 1000000000 tensors in"),
    "a billion keys": (file_of([], [], counts=(0, 10**9), data=bytes(99)), "announces 1000000000 keys in"),
    "a key of 4 GiB": (file_of([struct.pack("<Q", HUGE)], [], data=bytes(99)), "announces a text of 4294967301 bytes"),
    "a text of 4 GiB": (file_of([key("a", STRING, struct.pack("<Q", HUGE))], []), "'a' announces a text of 4294967301"),
    "a billion texts": (file_of([key("a", ARRAY, array(STRING, 10**9))], []), "announces 1000000000 texts where"),
    "a billion numbers": (file_of([key("a", ARRAY, array(UINT32, 10**9))], []), "announces 1000000000 numbers where"),
    "arrays of arrays": (
        file_of([key("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1))))], []),
        "'a' is an array of arrays",
    ),
    "a value of no type": (file_of([key("a", 13, bytes(8))], []), "'a' has a value of unknown type 13"),
    "an array of no type": (file_of([key("a", ARRAY, array(77, 1, bytes(8)))], []), "'a' has a value of unknown type"),
    "a key twice": (file_of([key("a", BOOL, b"\1")] * 2, [], data=bytes(99)), "has the key 'a' twice"),
    "no UTF-8": (file_of([key("a", STRING, text(b"\xff\xfe"))], []), "'a' is a text that is no UTF-8"),
    "an alignment of 3": (file_of([key("general.alignment", UINT32, struct.pack("<I", 3))], []), "no power of two"),
    "an alignment of 0": (file_of([key("general.alignment", UINT32, bytes(4))], []), "no power of two"),
    "nine dimensions": (file_of([], [entry("a", (1,) * 9, 0, 0)], SIXTEEN), "tensor 'a' has 9 dimensions"),
    "a tensor of nothing": (file_of([], [entry("a", (0,), 0, 0)], SIXTEEN), r"of F32 has rows of 0 in \[0\]"),
    "a tensor of half a block": (file_of([], [entry("a", (48,), 8, 0)], bytes(99)), "of Q8_0 has rows of 48"),
    "a tensor of no type": (file_of([], [entry("a", (4,), 99, 0)], SIXTEEN), "tensor 'a' is of unknown type 99"),
    "a tensor beyond the end": (file_of([], [entry("a", (4,), 0, 1 << 62)], SIXTEEN), "ends at byte"),
    "a tensor longer than the file": (file_of([], [entry("a", (1 << 60,), 0, 0)], SIXTEEN), "ends at byte"),
    "a tensor that overflows": (file_of([], [entry("a", (1 << 40, 1 << 40), 0, 0)], SIXTEEN), "ends at byte"),
    "a tensor between places": (file_of([], [entry("a", (4,), 0, 8)], bytes(64)), "lies at 8, which is no multiple"),
    "a tensor twice": (file_of([], ONE * 2, bytes(64)), "two tensors have one name"),
    "tensors over each other": (
        file_of([], [entry("a", (16,), 0, 0), entry("b", (4,), 0, 32)], bytes(128)),
        "tensor 'b' lies over another",
    ),
    "a tensor less": (file_of([], ONE, counts=(2, 0), data=SIXTEEN), "is no GGUF file"),
}


def read(path: Path) -> GGUFFile:
    """All that services read of a file."""
    file = read_gguf(path)
    config_of(file, quantized=True)
    tokenizer = GGUFTokenizer(Metadata(path, file.metadata))
    tokenizer.tokenizer_json()
    tokenizer.tokenizer_config()
    tokenizer.generation_config()
    return file


@pytest.mark.parametrize(("content", "why"), LIES.values(), ids=LIES.keys())
def test_a_file_that_lies_is_refused_before_memory_is_taken(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(GGUFError, match=why) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # What is read ahead, and little more.
    assert peak < 2 << 20
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ3_XXS", "TQ1_0", "MXFP4"])
def test_a_quantization_that_is_not_served_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    number = gguf.GGMLQuantizationType[kind].value
    path.write_bytes(file_of([], [entry("blk.0.ffn_up.weight", (256,), number, 0)], bytes(512)))
    with pytest.raises(UnsupportedGGUF, match=rf"tensor 'blk.0.ffn_up.weight' is {kind}, .* take a file .* Q4_K, "):
        read_gguf(path)


def test_sizes_of_blocks_are_those_of_the_format() -> None:
    for number, kind in TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block, kind.block_bytes)) == (known.name, gguf.GGML_QUANT_SIZES[known])


def test_a_file_is_read_as_the_formats_own_package_reads_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    file, reference = read(path), gguf.GGUFReader(str(path))
    known = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert {name: plain(value) for name, value in file.metadata.items()} == known
    for tensor in reference.tensors:
        found = file.tensors[tensor.name]
        assert (found.offset, found.shape, found.num_bytes) == (
            tensor.data_offset,
            tuple(int(size) for size in tensor.shape[::-1]),
            tensor.n_bytes,
        )
    assert len(file.tensors) == len(reference.tensors)


def plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else list(value)


MISSING = (
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
)


@pytest.mark.parametrize("name", MISSING)
def test_what_a_model_needs_and_a_file_lacks_is_named(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    # The same length, so that nothing else changes.
    path.write_bytes(path.read_bytes().replace(name.encode(), name[:-1].encode() + b"?"))
    with pytest.raises(GGUFError, match=f"has no metadata '{name}'"):
        read(path)


def written(path: Path, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    settings: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 32,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        **keys,
    }
    for name, value in settings.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, value in {"token_embd.weight": np.zeros((4, 8), np.float32), **tensors}.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a text for a number": ({"llama.block_count": "many"}, {}, "'llama.block_count' is 'many', and should be a whole"),
    "a negative number": ({"llama.block_count": -1}, {}, "'llama.block_count' is -1, and should be a whole number"),
    "layers without end": ({"llama.block_count": 10**6}, {}, "announces 1000000 layers"),
    "layers that differ": ({"llama.attention.head_count_kv": [1, 2]}, {}, "the same for all layers"),
    "no number": ({"llama.rope.freq_base": float("nan")}, {}, "should be a number above 0"),
    "an embedding of other tokens": ({"tokenizer.ggml.tokens": ["a", "b", "ab"]}, {}, "has 3 tokens of 8 numbers"),
    "a tensor of no layer": ({}, {"blk.1.attn_q.weight": np.zeros((8, 8), np.float32)}, "'llama' of 1 layers"),
    "a tensor of no place": ({}, {"blk.0.ssm_a": np.zeros(8, np.float32)}, "has a tensor 'blk.0.ssm_a' that"),
    "experts": ({"llama.expert_count": 8}, {}, "holds a mixture of experts"),
    "another architecture": ({"general.architecture": "mamba"}, {}, "holds a 'mamba' model; from GGUF files"),
    "another scaling": (
        {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0},
        {},
        "scales its rotary embedding by 'su'",
    ),
    "factors that are no row": ({}, {"rope_freqs.weight": np.ones((2, 2), np.float32)}, "should be a row of F32"),
    "another tokenizer": ({"tokenizer.ggml.model": "t5"}, {}, "has a tokenizer of kind 't5'"),
    "another way of cutting": ({"tokenizer.ggml.pre": "abacus"}, {}, "cuts texts into words as 'abacus' does"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "b", "ab", "a"]}, {}, "has the token 'a' twice"),
    "a merge of no tokens": ({"tokenizer.ggml.merges": ["a c"]}, {}, "has a merge 'a c' of what are no tokens"),
    "an end beyond the tokens": ({"tokenizer.ggml.eos_token_id": 4}, {}, "names token 4 as eos, and has 4 tokens"),
    "no end": (
        {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.tokens": ["c", "a", "b", "ab"]},
        {},
        "names no token that ends a text",
    ),
    "types of other tokens": ({"tokenizer.ggml.token_type": [1, 2]}, {}, "should be an array of 4 numbers"),
}


@pytest.mark.parametrize(("keys", "tensors", "why"), UNFIT.values(), ids=UNFIT.keys())
def test_what_does_not_fit_together_is_refused(
    keys: dict[str, Any], tensors: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match=why) as caught:
        read(written(tmp_path / "model.gguf", keys, tensors))
    assert "\n" not in str(caught.value)


# -- any bytes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf")


# The file's header, and some of its tensors.
PLACES = st.integers(0, 2600)
# Small numbers, those at the borders of types, and any.
NUMBERS = st.one_of(
    st.integers(0, 40), st.sampled_from([2**n - 1 for n in (8, 16, 31, 32, 63, 64)]), st.integers(0, 2**64 - 1)
)
CHANGES = st.one_of(
    st.tuples(st.just("byte"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("number"), PLACES, NUMBERS),
    st.tuples(st.just("cut"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("repeat"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("end"), PLACES, st.just(0)),
)


def changed(content: bytes, kind: str, place: int, value: int) -> bytes:
    match kind:
        case "byte":
            return content[:place] + bytes([value]) + content[place + 1 :]
        case "number":
            return content[:place] + struct.pack("<Q", value) + content[place + 8 :]
        case "cut":
            return content[:place] + content[place + value :]
        case "repeat":
            return content[: place + value] + content[place:]
    return content[:place]


@given(changes=st.lists(CHANGES, min_size=1, max_size=4))
def test_whatever_bytes_change_a_file_is_read_or_refused(
    changes: list[tuple[str, int, int]], whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = whole.read_bytes()
    for change in changes:
        content = changed(content, *change)
    path = whole.with_name("changed.gguf")
    path.write_bytes(content)
    try:
        assert read(path).num_bytes == len(content)
    except GGUFError as error:
        assert str(path) in str(error)  # noqa: PT017 (either is right)
