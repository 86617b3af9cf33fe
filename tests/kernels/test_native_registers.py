"""What compilers make of the loops over products: sums that stay in registers, and the same results on aarch64."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo.kernels.native import build
from octavo.kernels.native.build import LIBRARY, SOURCES
from octavo.testing.native import VARIANTS, loaded

LOOPS = ("multiply", "tile_scores", "add_values")
# A constant that takes pairs of bf16 apart may be read again and again; a sum may not.
MOST_TRANSFERS = 2
AARCH64 = "aarch64-linux-gnu-"
MULTIPLIED = re.compile(r"\bv?fn?madd|\bfmla\b|\bv?mulps\b|\bvdpbf16ps\b")
# A whole register to or from the stack. Broadcasts from there are of weights that lie there.
TRANSFER = re.compile(r"(\(%r[sb]p[,)].*%[xyz]mm|%[xyz]mm\d+,.*\(%r[sb]p[,)]|\bq\d+, .*\[(sp|x29))")
BRANCH = re.compile(r"(?:j\w+|b\.\w+|b|cbn?z|tbn?z)\s+(?:\w+, )*(?:#\d+, )?([0-9a-f]+)\b")


def inner_loops(
    objdump: str, path: Path, variant: str, names: Sequence[str] = LOOPS
) -> Iterator[tuple[str, list[str]]]:
    """Each function of `names` with each of its loops that holds no other and multiplies."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for function in text.split("\n\n"):
        head, *lines = function.strip().split("\n")
        if not re.search(rf"<.*octavo::{variant}::({'|'.join(names)})[<(]", head):
            continue
        code = [(int(address, 16), text.strip()) for line in lines for address, _, text in [line.partition(":\t")]]
        places = {address: place for place, (address, _) in enumerate(code)}
        spans = [
            (places[target], place)
            for place, (_, text) in enumerate(code)
            if (match := BRANCH.match(text)) and (target := int(match[1], 16)) in places and places[target] <= place
        ]
        for first, last in spans:
            if not any(first <= other <= end <= last for other, end in spans if (other, end) != (first, last)):
                loop = [text for _, text in code[first : last + 1]]
                if any(MULTIPLIED.search(text) for text in loop):
                    yield head, loop


def transfers(loop: list[str]) -> list[str]:
    return [text for text in loop if TRANSFER.search(text) and "broadcast" not in text]


def check_loops(objdump: str, path: Path, variant: str) -> None:
    loops = list(inner_loops(objdump, path, variant))
    # Two types, several numbers of rows, and each kind of loop.
    assert loops
    assert all(any(f"::{name}<" in head for head, _ in loops) for name in LOOPS)
    for head, loop in loops:
        assert len(transfers(loop)) <= MOST_TRANSFERS, (head, transfers(loop))
        assert not any(text.startswith(("call", "bl ")) for text in loop), head


@pytest.fixture
def objdump() -> str:
    """The path of a program that shows what GCC has made of the kernels for x86-64."""
    loaded()
    if "avx2" not in build._variants() or b"GCC: (" not in LIBRARY.read_bytes():
        pytest.skip("no library for x86-64 that GCC has compiled")
    if (found := shutil.which("objdump")) is None:
        pytest.skip("there is no objdump")
    return found


def test_sums_of_256_bits_stay_in_registers(objdump: str) -> None:
    check_loops(objdump, LIBRARY, "avx2")


def test_sums_of_products_of_codes_stay_in_registers(objdump: str) -> None:
    names = [
        rf"wide_tile<octavo::avx2_exact::WideCodes<{bits}, false>, {rows}>" for bits in (4, 8) for rows in (1, 2, 3, 4)
    ]
    loops = list(inner_loops(objdump, LIBRARY, "avx2_exact", names))
    assert len(loops) == len(names)
    for head, loop in loops:
        products = sum("vpmaddubsw" in text for text in loop)
        assert products >= 16, head
        # Of the most rows some sums come and go once in a group.
        assert len(transfers(loop)) <= products / 4, (head, transfers(loop))


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the portable kernels for aarch64, as an object and in a program that tries them."""
    compiler = shutil.which(f"{AARCH64}g++")
    if compiler is None:
        pytest.skip(f"there is no {AARCH64}g++ (Debian: g++-aarch64-linux-gnu)")
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform.machine", lambda: "aarch64")
        objects = [build._compile_variant(compiler, item, folder) for item in build._variant_sources()]
    common = [compiler, *build._FLAGS, '-DOCTAVO_SOURCES="none"', f"-I{SOURCES}"]
    parts = [*(SOURCES / name for name in build._COMMON), Path(__file__).parent / "native" / "driver.cpp"]
    subprocess.run([*common, "-static", *parts, *objects, "-o", folder / "driver"], check=True)
    return folder


@pytest.mark.deep
def test_sums_of_128_bits_stay_in_registers(aarch64: Path) -> None:
    check_loops(f"{AARCH64}objdump", aarch64 / "variant_portable.o", "portable")


@pytest.mark.deep
def test_the_kernels_compute_on_aarch64_what_plain_loops_do(aarch64: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("there is no qemu-aarch64 (Debian: qemu-user)")
    result = subprocess.run([emulator, aarch64 / "driver"], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(r"0 of \d{4,} checks failed\n", result.stdout)


def test_every_variant_is_named_in_the_tests() -> None:
    assert set(build._VARIANTS["x86_64"]) == set(VARIANTS)
