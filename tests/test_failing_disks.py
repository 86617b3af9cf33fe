"""Whatever writes meets disks that are full, broken or read-only: what no request needs goes on without, and all else
ends with one line. Production code that writes and is not tried here fails a test."""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import huggingface_hub
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from octavo.cli.main import main
from octavo.cli.supervision import SupervisionError, alone_with_children
from octavo.frontend.batch.answers import AnswerFile
from octavo.frontend.batch.files import FileBounds, Files
from octavo.frontend.batch.lines import answered_line
from octavo.frontend.batch.records import Records
from octavo.frontend.batch.storage import Storage, StorageError
from octavo.frontend.cli import client
from octavo.frontend.stored.database import StoreError
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.values import Limits
from octavo.frontend.text import tokenizer_cache
from octavo.kernels.native import build
from octavo.llm.engine import Engine, EngineError
from octavo.loadgen import cli as loadgen_cli
from octavo.loadgen.report import SessionOutcome
from octavo.quality import cli as quality_cli
from octavo.runtime.models.directory import ModelDirectoryError, resolve_model
from octavo.runtime.models.gguf import cache_entries
from octavo.runtime.models.hub import HubError, fetch
from octavo.runtime.models.publish import PublishError, publish
from octavo.runtime.models.step_times import Calibration, StepTimeModel, TokenTime
from octavo.runtime.telemetry import optional
from octavo.runtime.telemetry.numbers import Tally
from octavo.runtime.transport.endpoints import EndpointError, claimed, runtime_directory
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Tick
from octavo.scheduler.server.event_log import Began, Handled, LogWriter, Record, Scheduled, read_records, recorder
from octavo.simulator import cli as simulator_cli
from octavo.testbed.models import write_tiny_model
from octavo.testing.fakes.failing_disk import (
    BROKEN,
    FULL,
    NO_INODE,
    READ_ONLY,
    Disk,
    Failure,
    failing_disk,
    short_files,
)
from octavo.testing.small.kv_blocks import EAGER, IDENTITY, got, put
from octavo.testing.small.tiny_gguf import write_gguf
from octavo.wire.base import SCHEMA_VERSION
from octavo.worker.cli import calibrate as calibrate_cli
from octavo.worker.health import Liveness, health_server
from octavo.worker.kv_store.room import KVStoreError
from octavo.worker.kv_store.store import KVStore
from octavo.worker.loading.prepare import convert_with_transformers
from octavo.worker.models import kernel_race
from octavo.worker.process import LastWords
from octavo.worker.tensor_parallel.ranks import LocalRanks
from octavo.workload.job import Job, write_csv

ROOT = Path(__file__).parents[1]
FAILURES = {"read-only": READ_ONLY, "no inode": NO_INODE, "full": FULL, "broken": BROKEN}


@dataclass
class Trial:
    """Something that writes below `place`, while the disk there `breaks()`."""

    place: Path
    failure: Failure
    caplog: pytest.LogCaptureFixture
    monkeypatch: pytest.MonkeyPatch
    disk: Disk | None = None

    @contextmanager
    def breaks(self, **options: Any) -> Iterator[None]:
        with failing_disk(self.place, self.failure, **options) as self.disk:
            yield

    @property
    def reason(self) -> str:
        """What the system says."""
        return os.strerror(self.failure.number)

    def assert_tolerated(self, what: str, count: int) -> None:
        """It was counted so often, and said once, with what follows of it."""
        assert failures(what) == count
        (line,) = [record.message for record in self.caplog.records if record.levelname == "ERROR"]
        assert line.startswith(f"{what.replace('_', ' ')}: [Errno {self.failure.number}] {self.reason}")
        self.caplog.clear()

    def assert_told(self, text: str) -> None:
        """One line, that names the place and what failed."""
        (line,) = text.strip().splitlines()
        assert str(self.place) in line
        assert self.reason in line


def failures(what: str) -> float:
    (family,) = [optional.family()]
    return next((sample.value for sample in family.samples if sample.labels["what"] == what), 0.0)


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_failures", Tally())
    monkeypatch.setattr(optional, "_failing", set())


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_refused(trial: Trial, result: Result) -> None:
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("Error: ")
    trial.assert_told(result.stderr)


# -- what goes on without ----------------------------------------------------------------------------------------------


def event_log(trial: Trial) -> None:
    path = trial.place / "events"
    written: list[Record] = [Began(SCHEMA_VERSION, 7, SchedulerConfig())]
    written += [record for n in range(2000) for record in (Handled(float(n), Tick()), Scheduled(float(n)))]
    seen: list[bytes] = []
    with trial.breaks(room=20_000), LogWriter(path, 7) as log:
        record = recorder(log.write, seen.append)
        for each in written:
            record(each)
    trial.assert_tolerated(optional.EVENT_LOG, 1)
    assert len(seen) == len(written), "who follows the records misses some"
    if not trial.failure.at_making:
        with path.open("rb") as file:
            kept = list(read_records(file))
        assert 100 < len(kept) < len(written)
        assert kept == written[: len(kept)]
    # The next start finds the disk mended, and begins a log of its own.
    before = set(trial.place.iterdir())
    with LogWriter(path, 8) as log:
        recorder(log.write)(written[0])
    (new,) = set(trial.place.iterdir()) - before
    with new.open("rb") as file:
        assert list(read_records(file)) == written[:1]


def cache_of_tokenizers(trial: Trial) -> None:
    place = trial.place / "tokenizers" / "entry"
    with trial.breaks():
        for _ in range(3):
            tokenizer_cache.write(place, b"a tokenizer" * 1000)
    trial.assert_tolerated(optional.TOKENIZER_CACHE, 3)
    assert tokenizer_cache.read(place) is None
    assert not place.parent.exists() or list(place.parent.iterdir()) == []
    with trial.caplog.at_level("INFO"):
        tokenizer_cache.write(place, b"a tokenizer")
    assert trial.caplog.messages == ["tokenizer cache: works again"]
    assert tokenizer_cache.read(place) == b"a tokenizer"


def words_of_a_worker(trial: Trial) -> None:
    words = LastWords(trial.place / "worker.end", {})
    with trial.breaks(), words.kept():
        words.begin(7)
    trial.assert_tolerated(optional.LAST_WORDS, 1)


def speeds_of_kernels(trial: Trial) -> None:
    made = kernel_race.Speeds(1.0, 2.0)
    place = trial.place / "kernels" / "speeds.json"
    with trial.breaks():
        assert kernel_race._kept(place, lambda: made) == made
    trial.assert_tolerated(optional.KERNEL_SPEEDS, 1)
    assert kernel_race._kept(place, lambda: made) == made
    assert kernel_race._read(place) == made


def kept_blocks(trial: Trial) -> None:
    with KVStore(trial.place / "kv", 1 << 20, IDENTITY, EAGER) as store:
        with trial.breaks():
            put(store, 1, 2)
        trial.assert_tolerated(optional.KV_DISK_WRITES, 2)
        assert list(trial.place.rglob("*.kv")) == [], "segments without blocks are left"
        put(store, 3)
        assert got(store, [1, 2, 3]) == [3]


def directory_of_kept_blocks(trial: Trial) -> None:
    with (
        trial.breaks(),
        pytest.raises(KVStoreError, match=r"cannot keep KV blocks in .*; name another place") as refused,
    ):
        KVStore(trial.place / "kv", 1 << 20, IDENTITY)
    trial.assert_told(str(refused.value))


def stored_responses(trial: Trial) -> None:
    with (
        trial.breaks(),
        pytest.raises(StoreError, match=r"cannot keep responses in .*; name another place") as refused,
    ):
        Store(trial.place / "responses", Limits(1 << 20, 0, 1.0))
    trial.assert_told(str(refused.value))
    # A store of before is not opened either.
    Store(trial.place / "responses", Limits(1 << 20, 0, 1.0)).close()
    with trial.breaks(), pytest.raises(StoreError, match="name another place"):
        Store(trial.place / "responses", Limits(1 << 20, 0, 1.0))


def history_of_a_chat(trial: Trial) -> None:
    trial.monkeypatch.setenv("OCTAVO_CACHE", str(trial.place / "cache"))
    trial.monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with trial.breaks(), client._edited():
        pass
    assert not (trial.place / "cache" / "chat_history").exists()


def lock_of_children(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(SupervisionError) as refused, alone_with_children(trial.place / "lock", 1.0):
        pass
    trial.assert_told(str(refused.value))


# -- what ends with one line -------------------------------------------------------------------------------------------


def keys(trial: Trial) -> None:
    with trial.breaks():
        assert_refused(trial, invoke("keys", trial.place / "keys"))


def sockets(trial: Trial) -> None:
    trial.monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(trial.place / "run"))
    with trial.breaks():
        with pytest.raises(EndpointError) as refused:
            runtime_directory()
        trial.assert_told(str(refused.value))
        with pytest.raises(EndpointError) as refused, claimed(f"unix:{trial.place}/socket"):
            pass
        trial.assert_told(str(refused.value))


def cache_of_the_hub(trial: Trial) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        (trial.place / "config.json").write_text("{}")
        return str(trial.place)

    trial.monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with (
        trial.breaks(),
        pytest.raises(HubError, match="make room there, or name another place with HF_HOME") as refused,
    ):
        fetch("org/name")
    trial.assert_told(str(refused.value).replace("'org/name'", ""))


def calibration(trial: Trial) -> None:
    times = StepTimeModel([TokenTime(1, 0.1)], *8 * [0.0])
    found = Calibration("small", "cpu", "bfloat16", 2048, 1000, 16, 500, 100, times, 0.01)
    with trial.breaks(), pytest.raises(click.ClickException) as refused:
        calibrate_cli._write(found, trial.place / "calibration.json")
    trial.assert_told(refused.value.message)


def kernels(trial: Trial) -> None:
    trial.monkeypatch.setenv("CXX", sys.executable)
    trial.monkeypatch.setattr(build, "build", partial(build.build, trial.place / "lib" / "library.so"))
    with trial.breaks(), pytest.raises(SystemExit) as ended:
        build.main()
    trial.assert_told(str(ended.value))


def directory_of_an_engine(trial: Trial) -> None:
    trial.monkeypatch.setattr(tempfile, "tempdir", str(trial.place))
    with trial.breaks(), pytest.raises(EngineError) as refused:
        Engine([], {})
    trial.assert_told(str(refused.value))


def pickled_weights(trial: Trial) -> None:
    source = trial.place.parent / "pickled"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(10_000)}, source / "pytorch_model.bin")
    with trial.breaks():
        assert_refused(trial, invoke("convert-weights", source, "--output", trial.place / "model"))
    assert not (trial.place / "model").exists()


def quantised_weights(trial: Trial) -> None:
    source = trial.place.parent / "plain"
    write_like_transformers(trial.monkeypatch, source)
    with trial.breaks():
        assert_refused(trial, invoke("quantize", source, "--to", "q8_0", "--output", trial.place / "model"))
    assert not (trial.place / "model").exists()


def model_of_a_gguf(trial: Trial) -> None:
    gguf = write_gguf(trial.place.parent / "tiny.gguf")
    with trial.breaks():
        assert_refused(trial, invoke("prepare-model", "--gguf", gguf, "--output", trial.place / "model"))
    assert not (trial.place / "model").exists()
    trial.monkeypatch.setenv("OCTAVO_CACHE", str(trial.place / "cache"))
    with trial.breaks(), pytest.raises(ModelDirectoryError) as refused:
        resolve_model(str(gguf))
    trial.assert_told(str(refused.value))
    assert [path for path in trial.place.rglob("tiny") if path.is_dir()] == []
    assert resolve_model(str(gguf)).name == "tiny"


def uses_of_a_gguf(trial: Trial) -> None:
    gguf = write_gguf(trial.place.parent / "tiny.gguf")
    trial.monkeypatch.setenv("OCTAVO_CACHE", str(trial.place / "cache"))
    directory = resolve_model(str(gguf))
    trial.monkeypatch.setattr(cache_entries, "_held", {})
    for note in (directory.parent / ".use", directory.parent.parent / ".lock"):
        note.unlink()
    with trial.breaks():
        # Nothing is noted, nothing is removed, and the model is served.
        assert resolve_model(str(gguf)) == directory
    assert not (directory.parent / ".use").exists()
    assert resolve_model(str(gguf)) == directory
    assert (directory.parent / ".use").exists()


def model_by_transformers(trial: Trial) -> None:
    write_like_transformers(trial.monkeypatch, trial.place.parent / "tiny")
    with trial.breaks(), pytest.raises(PublishError) as refused:
        publish(trial.place / "model", partial(convert_with_transformers, Path("model.gguf")))
    trial.assert_told(str(refused.value))
    assert not (trial.place / "model").exists()


def write_like_transformers(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """As if it had read a GGUF file."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = write_tiny_model(directory, config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda **_: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda **_: None)


def published(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(PublishError) as refused:
        publish(trial.place / "models" / "model", lambda directory: None)
    trial.assert_told(str(refused.value))


def socket_of_health(trial: Trial) -> None:
    with (
        trial.breaks(),
        pytest.raises(EndpointError) as refused,
        health_server(f"unix:{trial.place}/health/socket", Liveness()),
    ):
        pass
    trial.assert_told(str(refused.value))


def meeting_of_ranks(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(EndpointError) as refused:
        LocalRanks(2, trial.place)
    trial.assert_told(str(refused.value))


def figures_of_a_load(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(click.ClickException, match="the figures are above") as refused:
        loadgen_cli._tell(SessionOutcome(0, [], []), trial.place / "outcome.json")
    trial.assert_told(refused.value.message)


def figures_of_a_simulation(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(click.ClickException) as refused:
        simulator_cli._write(trial.place / "report.json", {"seed": 0})
    trial.assert_told(refused.value.message)


def figures_of_a_quality(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(click.ClickException) as refused:
        quality_cli._write(trial.place / "figures.json", {"perplexity": 0})
    trial.assert_told(refused.value.message)


def trace_of_a_load(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(OSError, match=r"\[Errno") as refused:
        write_csv(trial.place / "trace.csv", [Job(0.0, 5, 6)])
    trial.assert_told(str(refused.value) if trial.failure.at_making else f"{refused.value} {trial.place}")


def directory_of_batches(trial: Trial) -> None:
    with trial.breaks(), pytest.raises(StorageError, match=r"can be kept in .*; name another place") as refused:
        Storage(trial.place / "batches")
    trial.assert_told(str(refused.value))


def file_of_a_client(trial: Trial) -> None:
    storage = Storage(trial.place / "batches")
    files = Files(storage, FileBounds(1 << 20, 1 << 20, 60), lambda: 0)
    folder = storage.files_of("tenant")
    # Where it is full, it takes some of the content.
    with trial.breaks(room=1000), pytest.raises(OSError, match=trial.reason):
        take_in(files, b"a" * 1500)
    assert list(folder.iterdir()) == []


def take_in(files: Files, content: bytes) -> None:
    upload = files.begin("tenant")
    try:
        upload.write(content)
    finally:
        upload.abandon()


def batch_of_a_client(trial: Trial) -> None:
    storage = Storage(trial.place / "batches")
    files = Files(storage, FileBounds(1 << 20, 1 << 20, 60), lambda: 0)
    records = Records(storage, files, lambda: 0)
    content = trial.place / "calls.jsonl"
    content.write_bytes(b"{}")
    fields: dict[str, Any] = dict.fromkeys(("endpoint", "input_file_id", "completion_window"), "")
    fields |= {"trusted": True, "created_at": 0, "expires_at": 1, "files_expire_after_s": 1}
    with trial.breaks(), pytest.raises(OSError, match=trial.reason):
        records.create("tenant", content, **fields)
    assert (records.open_batches(), records.all_of("tenant")) == ([], [])
    assert list(storage.batches_of("tenant").iterdir()) == []
    made = records.create("tenant", content, **fields)
    assert records.open_batches() == [(made.id, "tenant")]


def answers_of_a_batch(trial: Trial) -> None:
    lines = [answered_line(str(n), 200, "id", b"{}") for n in range(3)]
    path = trial.place / "answers"
    with trial.breaks(room=len(lines[0]) + 10):
        answers = AnswerFile(path)
        answers.append(lines[0])
        # Some of it was written.
        with pytest.raises(OSError, match=trial.reason):
            answers.append(lines[1])
        assert path.read_bytes() == lines[0]
        assert trial.disk is not None
        trial.disk.mend()
        answers.append(lines[2])
        answers.close()
    with closing(AnswerFile(path)) as answers:
        assert answers.custom_ids() == {"0", "2"}


# What writes, and how it is tried: on every disk, on those where nothing can be made, or where nothing can be written.
MAKING, WRITING = ("read-only", "no inode"), ("full", "broken")
Try = Callable[[Trial], None]
TRIED: dict[str, tuple[Try, tuple[str, ...]]] = {
    "scheduler/octavo/scheduler/server/event_log.py": (event_log, MAKING + WRITING),
    "frontend/octavo/frontend/text/tokenizer_cache.py": (cache_of_tokenizers, MAKING + WRITING),
    "worker/octavo/worker/process.py": (words_of_a_worker, MAKING + WRITING),
    # Its temporary file is opened by way of a directory, which is how far a broken disk is imitated.
    "worker/octavo/worker/models/kernel_race.py": (speeds_of_kernels, MAKING),
    "worker/octavo/worker/kv_store/segment.py": (kept_blocks, WRITING),
    "worker/octavo/worker/kv_store/room.py": (directory_of_kept_blocks, MAKING),
    # What SQLite writes by itself is tried with the store.
    "frontend/octavo/frontend/stored/database.py": (stored_responses, MAKING),
    "frontend/octavo/frontend/cli/client.py": (history_of_a_chat, MAKING),
    "frontend/octavo/frontend/batch/storage.py": (directory_of_batches, MAKING),
    "frontend/octavo/frontend/batch/files.py": (file_of_a_client, MAKING + WRITING),
    "frontend/octavo/frontend/batch/records.py": (batch_of_a_client, MAKING + WRITING),
    "frontend/octavo/frontend/batch/answers.py": (answers_of_a_batch, WRITING),
    "frontend/octavo/cli/supervision.py": (lock_of_children, MAKING),
    "proto/octavo/runtime/transport/curve_keys.py": (keys, MAKING + WRITING),
    "proto/octavo/runtime/transport/endpoints.py": (sockets, MAKING),
    "proto/octavo/runtime/models/hub.py": (cache_of_the_hub, MAKING + WRITING),
    "proto/octavo/runtime/models/step_times.py": (calibration, MAKING + WRITING),
    "kernels/octavo/kernels/native/build.py": (kernels, MAKING),
    "frontend/octavo/llm/engine.py": (directory_of_an_engine, MAKING),
    "worker/octavo/worker/loading/convert_weights.py": (pickled_weights, WRITING),
    "worker/octavo/worker/loading/quantize_model.py": (quantised_weights, WRITING),
    "worker/octavo/worker/loading/prepare.py": (model_by_transformers, WRITING),
    "proto/octavo/runtime/models/gguf/directory.py": (model_of_a_gguf, WRITING),
    "proto/octavo/runtime/models/gguf/cache_entries.py": (uses_of_a_gguf, MAKING),
    "proto/octavo/runtime/models/publish.py": (published, MAKING),
    "worker/octavo/worker/health.py": (socket_of_health, MAKING),
    "worker/octavo/worker/tensor_parallel/ranks.py": (meeting_of_ranks, MAKING),
    "evaluation/octavo/loadgen/cli.py": (figures_of_a_load, MAKING + WRITING),
    "evaluation/octavo/simulator/cli.py": (figures_of_a_simulation, MAKING + WRITING),
    "evaluation/octavo/quality/cli.py": (figures_of_a_quality, MAKING + WRITING),
    "evaluation/octavo/workload/job.py": (trace_of_a_load, MAKING + WRITING),
}
# Tried below by itself; memory that has a file's descriptor.
OTHERWISE = {"proto/octavo/runtime/telemetry/logs.py", "worker/octavo/worker/tensor_parallel/links.py"}
# What whoever works on Octavo runs, and no server.
DEVELOPERS = (
    "evaluation/octavo/paper/",
    "evaluation/octavo/bench/",
    "evaluation/octavo/chaos/",
    "evaluation/octavo/testbed/",
    "proto/octavo/v1/generate.py",
    "frontend/octavo/client/generate.py",
    "kernels/octavo/kernels/triton/ahead.py",
)


@pytest.mark.parametrize(
    ("path", "failure"), [(path, failure) for path, (_, failures) in TRIED.items() for failure in failures]
)
def test_what_writes_meets_a_failing_disk(
    path: str, failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    trial = Trial(place, FAILURES[failure], caplog, monkeypatch)
    TRIED[path][0](trial)
    assert trial.disk is not None
    assert str(ROOT / path) in trial.disk.met, "it has not met the failure"


def model_with_short_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_like_transformers(monkeypatch, tmp_path / "tiny")
    with short_files():
        publish(tmp_path / "model", partial(convert_with_transformers, Path("model.gguf")))


def test_tensors_that_a_library_writes_are_refused_in_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PublishError, match=r"cannot write .*model: .*File too large.*; make room there"):
        model_with_short_files(monkeypatch, tmp_path)
    assert not (tmp_path / "model").exists()


PRINTING = """
from octavo.runtime.telemetry import logs, optional
logs.configure("info", "console")
for _ in range(3):
    logs.say("for people to read")
assert [sample.value for sample in optional.family().samples if sample.labels == {"what": "output"}] == [1.0]
"""
LOGGING = """
import logging
from octavo.runtime.telemetry import logs, optional
logs.configure("info", "console")
for _ in range(3):
    logging.getLogger("a").error("news")
assert [sample.value for sample in optional.family().samples if sample.labels == {"what": "output"}] == [3.0]
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("code", "stream"), [(PRINTING, "stdout"), (LOGGING, "stderr")])
def test_a_full_disk_under_what_is_printed_or_logged_ends_nothing(code: str, stream: str) -> None:
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {stream: full, other: subprocess.PIPE}
        # Buffered, as in a shell that does not say otherwise.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, text=True, timeout=60, check=False, env=environment, **streams)
    assert done.returncode == 0
    said = (done.stderr or done.stdout).splitlines()
    assert len(said) == (stream == "stdout"), "it is said once, where that can be"


# -- nothing is left out -----------------------------------------------------------------------------------------------

MAKERS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "rename", "symlink", "symlink_to", "truncate"),
    *("mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
    *(
        "memfd_create",
        "ftruncate",
        "copyfile",
        "copy2",
        "copytree",
        "copyfileobj",
        "FileHandler",
        "RotatingFileHandler",
    ),
    *("save", "save_file", "save_pretrained", "tofile", "snapshot_download", "hf_hub_download"),
}
MAKERS_IN_FULL = {"os.replace", "os.link", "shutil.move", "shutil.copy", "sqlite3.connect", "shelve.open"}
VERBS_IN_FULL = {name.rpartition(".")[2] for name in MAKERS_IN_FULL}


def writes(source: str) -> Iterator[str]:
    """What is called in a source that makes or changes files, or has a library do so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            verb = getattr(node.func, "attr", getattr(node.func, "id", ""))
            # What a call is in full takes longer to tell.
            is_maker = verb in MAKERS or (verb in VERBS_IN_FULL and ast.unparse(node.func) in MAKERS_IN_FULL)
            if is_maker or (verb in ("open", "fdopen") and _opens_to_write(node)):
                yield verb


def _opens_to_write(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [str(each.value) for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"))
    return flags or any(mode and set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)


def test_everything_that_writes_is_tried() -> None:
    portions = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")
    sources = [path for portion in portions for path in (ROOT / portion).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if any(writes(path.read_text(encoding="utf-8")))}
    assert {path for path in found if not path.startswith(DEVELOPERS)} == TRIED.keys() | OTHERWISE


def test_the_rule_finds_planted_writers() -> None:
    planted = """
open("file", "wb"); path.open(mode="a"); io.open("file", "r+"); os.open("file", os.O_CREAT)
os.fdopen(3, "w")
path.write_text("a"); tempfile.mkstemp(); os.replace("a", "b"); save_file({}, "a"); logging.FileHandler("a")
"""
    assert len(list(writes(planted))) == 10
    reading = 'open("file"); open("file", "rb"); path.open(); text.replace("a", "b"); os.open("file", os.O_RDONLY)'
    assert list(writes(reading)) == []
