"""What is carried to a machine with a GPU that has no network."""

import sys
import zipfile
from pathlib import Path

import pytest

from octavo.bench.gpu.served.carried import NAMES, CarriedError, main, misfit, pip_command, requirements, unpack

ROOT = Path(__file__).parents[4]


def wheel(folder: Path, name: str, **files: str) -> Path:
    """With these `files`, whose names have __ for a slash."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file.replace("__", "/"), text)
    return path


def test_the_lock_gives_every_package_one_version() -> None:
    wanted = requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert len(wanted) == len(NAMES) == 14
    assert all(line.count("==") == 1 for line in wanted)
    with pytest.raises(CarriedError, match=r"constraints\.txt has no gguf, googleapis-common-protos"):
        requirements("msgspec==1.0\n")


def test_wheels_are_wanted_for_the_other_machine_and_nothing_is_built() -> None:
    command = " ".join(pip_command(Path("there"), ["a==1", "b==2"], "3.12", "x86_64"))
    assert "--only-binary :all:" in command
    assert "--no-deps" in command
    assert "--python-version 3.12" in command
    for platform in ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_28", "manylinux_2_31"):
        assert f"--platform {platform}_x86_64" in command
    assert "--abi cp312 --abi abi3 --abi none" in command
    assert command.endswith("a==1 b==2")


def test_packages_are_laid_out_for_the_import_path(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "one", one____init__="x = 1", **{"one-1.0.dist-info__METADATA": "Name: one"})
    data = {"two-1.0.data__platlib__two__part": "x = 2", "two-1.0.data__scripts__run": "#!"}
    wheel(tmp_path / "wheels", "two", **data)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/stale").write_text("of another day")
    assert unpack(tmp_path / "wheels", tmp_path / "packages") == ["one", "two"]
    files = sorted(str(path.relative_to(tmp_path / "packages")) for path in (tmp_path / "packages").rglob("*.*"))
    assert "one-1.0.dist-info" in files
    assert (tmp_path / "packages/two/part").read_text() == "x = 2"
    assert not (tmp_path / "packages/stale").exists()
    assert not list((tmp_path / "packages").rglob("run"))


def test_a_wheel_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "bad", **{"..__escaped": "x"})
    with pytest.raises(CarriedError, match="outside"):
        unpack(tmp_path / "wheels", tmp_path / "packages")
    assert not (tmp_path / "escaped").exists()


def test_without_wheels_it_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unpack", "--wheels", str(tmp_path), "--into", str(tmp_path / "packages")]) == 1
    assert "`make gpu-wheels` fetches them" in capsys.readouterr().err


def test_wheels_for_another_python_are_refused(tmp_path: Path) -> None:
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in (f"a-1-{ours}-{ours}-manylinux2014_x86_64", "b-1-cp39-abi3-manylinux_2_31_x86_64", "c-1-py3-none-any"):
        (tmp_path / f"{name}.whl").touch()
    assert misfit(tmp_path) is None
    (tmp_path / "d-1-cp27-cp27-manylinux2014_x86_64.whl").touch()
    with pytest.raises(CarriedError, match=rf"d-1-cp27.* this Python, which is {ours}"):
        unpack(tmp_path, tmp_path / "packages")


def test_a_broken_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "half-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CarriedError, match=r"half-1\.0"):
        unpack(tmp_path, tmp_path / "packages")
