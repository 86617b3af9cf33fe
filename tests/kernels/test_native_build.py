"""Compiling the kernels, and what an installation does about it. The compiler is a stand-in: true ones take long."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.kernels.native import build

ROOT = Path(__file__).parents[2]
# Writes its arguments, and so the hash that it is to build in, to where its output belongs, and what its objects say.
COMPILER = """#!/bin/sh
all="$*" output=/dev/null objects=
while [ $# -gt 0 ]; do
    case "$1" in
        -o) output="$2"; shift ;;
        *.o) objects="$objects $1" ;;
    esac
    shift
done
{ echo "$all"; cat $objects /dev/null; } > "$output"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_a_build_leaves_the_library_and_nothing_else(compiler: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "kernels.so"
    assert not build.is_current(library)
    build.build(library)
    assert build.is_current(library)
    assert list(library.parent.iterdir()) == [library]


def test_a_library_of_changed_sources_is_not_current(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, library = tmp_path / "src", tmp_path / "lib" / "kernels.so"
    sources.mkdir()
    (sources / "one.h").write_text("int one;")
    monkeypatch.setattr(build, "SOURCES", sources)
    build.build(library)
    (sources / "one.h").write_text("int two;")
    assert not build.is_current(library)
    build.build(library)
    assert build.is_current(library)


def test_a_failing_compiler_leaves_what_there_was_and_is_quoted(compiler: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "kernels.so"
    build.build(library)
    before = library.read_bytes()
    compiler.write_text("#!/bin/sh\necho 'what is an f32x16?' >&2\nexit 1\n")
    with pytest.raises(build.BuildError, match=r"(?s)compiler -std=c\+\+17 .* failed:\nwhat is an f32x16\?"):
        build.build(library)
    assert library.read_bytes() == before
    assert list(library.parent.iterdir()) == [library]


def test_the_library_names_an_openmp_runtime_only_if_it_is_clangs(compiler: Path, tmp_path: Path) -> None:
    build.build(tmp_path / "kernels.so")
    gcc, *compiled = (tmp_path / "kernels.so").read_text().splitlines()
    assert "-fopenmp" not in gcc.split()
    assert all("-fopenmp" in each.split() for each in compiled)
    compiler.write_text(COMPILER + '[ "$all" = --version ] && echo clang version 14 || true\n')
    build.build(tmp_path / "kernels.so")
    assert "-fopenmp" in (tmp_path / "kernels.so").read_text().splitlines()[0].split()


def test_a_missing_compiler_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"found as no-such-compiler; on Debian .*: apt-get install g\+\+"):
        build.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"found as g\+\+ or c\+\+ or clang\+\+"):
        build.find_compiler()


def test_the_command_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="Octavo's CPU kernels are not compiled, and without them models run slower"):
        build.main()


def test_every_kind_of_machine_has_a_portable_variant(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = {}
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        build.build(tmp_path / "kernels.so")
        compiled[machine] = (tmp_path / "kernels.so").read_text()
        assert build.is_current(tmp_path / "kernels.so")
        assert "portable.o" in compiled[machine]
    assert "amx.o" in compiled["x86_64"]
    assert "avx" not in compiled["aarch64"]


class _Interface:
    """What hatchling's own class of this name gives to a hook."""

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __init__(self, root: Path) -> None:
        self.root, self.app, self.warnings = str(root), self, list[str]()

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build hook over a source tree of its own."""
    package = "hatchling.builders.hooks.plugin.interface"
    for name in [package[: package.find(".", at)] for at in range(len(package)) if package.find(".", at) > 0]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = ModuleType(package)
    interface.BuildHookInterface = _Interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "kernels/hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native = tmp_path / "tree" / module._BUILD
    (native.parent / "src").mkdir(parents=True)
    native.write_text(Path(build.__file__).read_text())
    return module.KernelsHook(tmp_path / "tree")


def build_data(hook: Any, version: str) -> dict[str, Any]:
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook.initialize(version, data)
    return data


def test_a_wheel_holds_the_library_and_is_tagged_with_its_machine(compiler: Path, hook: Any) -> None:
    data = build_data(hook, "standard")
    [artifact] = data["artifacts"]
    assert artifact == "kernels/octavo/kernels/native/lib/liboctavo_kernels.so"
    assert Path(hook.root, artifact).is_file()
    assert data["tag"].startswith("py3-none-linux_")
    assert not data["pure_python"]
    assert hook.warnings == []


def test_an_editable_install_finds_the_library_in_the_tree(compiler: Path, hook: Any) -> None:
    assert build_data(hook, "editable") == {"artifacts": [], "pure_python": True}
    assert Path(hook.root, "kernels/octavo/kernels/native/lib/liboctavo_kernels.so").is_file()


def test_a_library_that_is_current_is_not_compiled_again(compiler: Path, hook: Any) -> None:
    build_data(hook, "standard")
    compiler.unlink()
    assert build_data(hook, "standard")["artifacts"]


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_the_wheel_serves_any_machine_and_a_line_says_so(
    hook: Any, compiler: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    if broken:
        compiler.write_text("#!/bin/sh\nprintf 'error: one\nerror: two\n' >&2\nexit 1\n")
    else:
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_data(hook, "standard") == {"artifacts": [], "pure_python": True}
    [warning] = hook.warnings
    assert "\n" not in warning
    assert warning.startswith("Octavo's CPU kernels are not compiled")


def test_the_hook_is_part_of_the_build_and_the_library_of_no_commit() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "custom" in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    library = build.LIBRARY.relative_to(ROOT)
    assert f"/{library.parent}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    # An image compiles its own: this machine's may want another C library.
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "!kernels/hatch_build.py" in ignored
    assert ignored.index(str(library.parent)) > ignored.index("!kernels")
    assert str(library) in (ROOT / "Makefile").read_text(encoding="utf-8").replace(
        "$(NATIVE)", "kernels/octavo/kernels/native"
    )
