"""A release names one version everywhere, and `make dist-test` tells what does not work in an empty environment."""

import sys
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from octavo.testing.pythons import supported
from octavo.testing.wheels import TrialError, complete, environment, run, serving, wheel_for_this_machine

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
VERSION = tomllib.loads(PYPROJECT)["project"]["version"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("CHANGELOG.md", f"## [{VERSION}] - 20"),
        ("SECURITY.md", f"| {VERSION.rpartition('.')[0]} | yes |"),
        ("README.md", f"version {VERSION}"),
        ("docs/kubernetes.md", f'newTag: "{VERSION}"'),
        ("docs/running.md", f"octavo-{VERSION}-py3-none-manylinux"),
    ],
)
def test_every_page_that_names_the_version_names_this_one(page: str, words: str) -> None:
    assert words in read(page)


def test_a_release_is_tested_and_tried_on_every_supported_python_before_anything_is_published() -> None:
    jobs = yaml.safe_load(read(".github/workflows/release.yml"))["jobs"]
    steps = jobs["build"]["steps"]
    [pythons] = [step["with"]["python-version"].split() for step in steps if "setup-python" in step.get("uses", "")]
    assert sorted(pythons) == [f"3.{minor}" for minor in supported(PYPROJECT)]
    commands = [step["run"] for step in steps if step.get("run", "").startswith(("make", ".ci"))]
    assert commands == [".ci/run", "make dist", "make dist-test"]
    assert (jobs["publish"]["needs"], jobs["images"]["needs"]) == ("build", "publish")


def test_all_holds_every_part_that_serves() -> None:
    extras = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    [everything] = extras["all"]
    assert {"frontend", "scheduler", "worker"} <= set(everything[len("octavo[") : -1].split(",")) <= set(extras)


def test_the_wheel_is_that_of_this_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrialError, match="found 0; run `make dist`"):
        wheel_for_this_machine(tmp_path)
    for name in ("py3-none-any", "py3-none-linux_x86_64", "py3-none-manylinux_2_27_aarch64"):
        (tmp_path / f"octavo-1.0-{name}.whl").touch()
    monkeypatch.setattr("os.uname", lambda: type("Machine", (), {"machine": "x86_64"}))
    with pytest.raises(TrialError, match=r"one manylinux wheel for x86_64 .*, found 0"):
        wheel_for_this_machine(tmp_path)
    wanted = tmp_path / "octavo-1.0-py3-none-manylinux_2_27_x86_64.whl"
    wanted.touch()
    assert wheel_for_this_machine(tmp_path) == wanted


def test_a_command_that_fails_is_told_with_its_last_words() -> None:
    assert run([sys.executable, "-c", "print('well')"]) == "well"
    with pytest.raises(TrialError, match=r"-c \.\.\.: status 1: SystemExit: no room|status 1: no room"):
        run([sys.executable, "-c", "raise SystemExit('no room')"])


def test_nothing_of_the_source_tree_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OCTAVO_MODEL", "CPATH"):
        monkeypatch.setenv(name, str(ROOT))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://an.example/index")
    variables = environment(tmp_path / "bin", tmp_path)
    assert str(ROOT) not in "".join(variables.values())
    assert variables["PIP_EXTRA_INDEX_URL"] == "https://an.example/index"


# In the place of `octavo serve`: answers with a text, and ends as it is told to.
_SERVER = """#!{python}
import http.server, json, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.dumps({{"choices": [{{"text": {text!r}}}]}}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
print("last words", flush=True)
if {early}: sys.exit(4)
host, _, port = os.environ["OCTAVO_HTTP_LISTEN"].rpartition(":")
signal.signal(signal.SIGTERM, lambda *_: os._exit({status}))
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


def stand_in(folder: Path, text: str = "four", status: int = 0, early: bool = False) -> Path:
    path = folder / "octavo"
    path.write_text(_SERVER.format(python=sys.executable, text=text, status=status, early=early))
    path.chmod(0o755)
    return path


def test_a_server_that_answers_and_ends_well_passes(tmp_path: Path) -> None:
    with serving(stand_in(tmp_path), {}, tmp_path) as address:
        assert complete(address) == "four"


def test_an_empty_answer_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(TrialError, match="the answer to a question is empty"),
        serving(stand_in(tmp_path, text=" "), {}, tmp_path) as address,
    ):
        complete(address)


def test_a_server_that_ends_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(TrialError, match="octavo serve ended with status 4: last words"),
        serving(stand_in(tmp_path, early=True), {}, tmp_path),
    ):
        pass


def test_a_server_that_does_not_end_well_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(TrialError, match="ended with status 3 when it was asked to end: last words"),
        serving(stand_in(tmp_path, status=3), {}, tmp_path),
    ):
        pass
