"""What is asked of llama.cpp's programs, and what is made of their answers; the programs are played."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import llama_cpp_peer
from octavo.bench.llama_cpp_peer import LlamaCppPeer, gguf_file
from octavo.bench.measurement import OTHERS
from octavo.bench.workloads import make_case

# Each writes what it was asked into a file beside it.
_SCRIPT = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

me, arguments = Path(__file__), sys.argv[1:]
log = me.with_suffix(".log")
def note(what):
    with log.open("a") as file:
        file.write(json.dumps(what) + "\\n")
{body}
"""
_BENCH = """
note(arguments)
value = lambda flag: int(arguments[arguments.index(flag) + 1])
seconds = [0.5 * (1 + index) for index in range(value("-r"))]
print(json.dumps([{"samples_ns": [int(1e9 * each) for each in seconds]}]))
"""
_SERVER = """
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        note({"path": self.path, **asked})
        self.reply({"tokens_predicted": asked["n_predict"], "timings": {"prompt_ms": 0.5}})
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *_):
        pass
if arguments == ["--version"]:
    print("version: 0.5.0-test (abc)", file=sys.stderr)
else:
    note(arguments)
    ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""
_QUANTIZE = """
note(arguments)
Path(arguments[1]).write_text(Path(arguments[0]).read_text() + arguments[2])
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what plays llama.cpp's programs."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, body in (("llama-bench", _BENCH), ("llama-server", _SERVER), ("llama-quantize", _QUANTIZE)):
        path = directory / name
        path.write_text(_SCRIPT.format(python=sys.executable, body=body))
        path.chmod(0o755)
    monkeypatch.setattr(llama_cpp_peer, "_PROGRAMS", directory)
    return directory


@pytest.fixture
def peer(programs: Path) -> Iterator[LlamaCppPeer]:
    peer = LlamaCppPeer(programs / "model.gguf", 1000, 2)
    yield peer
    if peer.server is not None:
        peer.server.close()


def asked(programs: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (programs / f"{name}.log").read_text().splitlines()]


def test_one_stream_is_its_prompt_and_then_its_tokens_at_that_depth(peer: LlamaCppPeer, programs: Path) -> None:
    run = peer.run(make_case("a", 100))
    shared = ["-m", str(programs / "model.gguf"), "-t", "2", "-fa", "on", "-o", "json"]
    assert asked(programs, "llama-bench") == [
        [*shared, "-p", "128", "-n", "0", "-r", "1"],
        [*shared, "-p", "0", "-n", "128", "-d", "128", "-r", "1"],
    ]
    # 128 tokens in half a second, of which the first is the prompt's.
    assert run.ttft_ms == 500
    assert run.ms_per_token == pytest.approx(500 / 128)
    assert run.wall_s == pytest.approx(0.5 + 0.5 * 127 / 128)
    assert run.cpu_s["llama-bench"] > 0 <= run.cpu_s[OTHERS]


def test_others_have_no_less_than_nothing_where_the_machines_count_is_behind(
    peer: LlamaCppPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_peer, "machine_cpu_s", lambda: 5.0)
    assert peer.run(make_case("c", 100)).cpu_s[OTHERS] == 0


def test_prompts_are_as_many_repetitions(peer: LlamaCppPeer, programs: Path) -> None:
    run = peer.run(make_case("c", 100))
    [arguments] = asked(programs, "llama-bench")
    assert arguments[-6:] == ["-p", "1024", "-n", "0", "-r", "8"]
    assert run.wall_s == sum(0.5 * (1 + index) for index in range(8))


def test_requests_side_by_side_are_sent_to_the_server_as_they_are(peer: LlamaCppPeer, programs: Path) -> None:
    case = make_case("b", 100, quick=True)
    run = peer.run(case)
    options, *requests = asked(programs, "llama-server")
    assert options[options.index("-np") + 1] == "64"
    assert {request["path"] for request in requests} == {"/completion"}
    sent = sorted((request["prompt"], request["n_predict"]) for request in requests)
    assert sent == sorted((job.prompt_token_ids, job.num_tokens) for job in case.jobs)
    assert all(request["ignore_eos"] and not request["cache_prompt"] and request["top_k"] == 1 for request in requests)
    assert run.output_tokens_per_s == pytest.approx(case.num_output_tokens / run.wall_s)
    assert peer.memory()["peak"] > peer.memory()["kv"] == 1000


def test_a_case_that_it_is_not_asked_for_is_refused(peer: LlamaCppPeer) -> None:
    with pytest.raises(ValueError, match=r"case d is not measured on llama\.cpp; a, b and c are"):
        peer.run(make_case("d", 100))


def test_it_says_its_version(peer: LlamaCppPeer) -> None:
    assert "version 0.5.0-test, -fa on" in peer.about()


def test_a_program_that_fails_says_why(programs: Path, peer: LlamaCppPeer) -> None:
    (programs / "llama-bench").write_text(f"#!{sys.executable}\nimport sys; sys.exit('no such model')\n")
    with pytest.raises(RuntimeError, match="llama-bench ended with status 1: no such model"):
        peer.run(make_case("a", 100))


def test_a_server_that_ends_at_once_is_not_waited_for(programs: Path, peer: LlamaCppPeer) -> None:
    (programs / "llama-server").write_text(f"#!{sys.executable}\nimport sys; sys.exit(3)\n")
    with pytest.raises(RuntimeError, match="llama-server ended with status 3 while it started"):
        peer.run(make_case("b", 100, quick=True))


def test_the_server_ends_with_the_process_that_started_it(programs: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom octavo.bench import llama_cpp_peer\n"
        "llama_cpp_peer._PROGRAMS = Path(sys.argv[1])\n"
        "print(llama_cpp_peer.LlamaServer(Path('model.gguf'), 1).pid)\n"
    )
    command = [sys.executable, "-c", script, str(programs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(done.stdout))
        ended, _, _ = select.select([handle], [], [], 60)
        os.close(handle)
        assert ended


def test_files_are_made_once_and_anew_for_other_weights(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "peers"))
    source = tmp_path / "source"
    source.mkdir()
    convert = "import sys; from pathlib import Path; Path(sys.argv[5]).write_text(sys.argv[3])"
    (source / "convert_hf_to_gguf.py").write_text(convert)
    monkeypatch.setattr(llama_cpp_peer, "_SOURCE", source)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = gguf_file(model, "Q4_0")
    assert first.read_text() == "bf16Q4_0"
    assert gguf_file(model, "Q4_0") == first
    assert len(asked(programs, "llama-quantize")) == 1
    (model / "model.safetensors").write_text("weights")
    assert gguf_file(model, "Q4_0") != first
