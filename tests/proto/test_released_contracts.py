"""The public contract breaks no release: `buf breaking` finds what would, and the checks ask it about every release."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"
RELEASES = sorted((PROTO / "released").glob("*.binpb"))


def breaks(contract: Path, release: Path) -> str:
    """What buf says that `contract` breaks of a release."""
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run(
        [buf, "breaking", contract, "--against", release], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 100), done.stderr
    return done.stdout


def test_there_is_a_release() -> None:
    assert RELEASES


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_the_contract_breaks_no_release(release: Path) -> None:
    assert breaks(PROTO, release) == ""


@pytest.mark.parametrize(
    ("text", "instead", "complaint"),
    [
        ("string request_id = 1;", "string request_id = 99;", 'Previously present field "1" with name "request_id"'),
        ("rpc Abort(", "rpc Cancel(", 'Previously present RPC "Abort" on service "GenerationService" was deleted'),
    ],
)
def test_what_would_break_one_is_found(tmp_path: Path, text: str, instead: str, complaint: str) -> None:
    changed = tmp_path / "proto"
    shutil.copytree(PROTO / "octavo" / "v1", changed / "octavo" / "v1")
    shutil.copy(PROTO / "buf.yaml", changed)
    generation = changed / "octavo" / "v1" / "generation.proto"
    before = generation.read_text()
    assert text in before
    generation.write_text(before.replace(text, instead))
    assert complaint in breaks(changed, RELEASES[-1])
