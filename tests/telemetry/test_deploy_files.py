"""The files of deploy/obs fit each other, compose.yaml, and what the processes really expose."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from octavo.frontend.access.admission import Admission
from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.metrics import LOAD_METRICS, CellMetrics, FrontendMetrics
from octavo.runtime.telemetry.metrics import expose, render
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics
from octavo.testing.metrics import FakeCell, FakeCells
from octavo.v1.admin_pb2 import TIER_CPU, TIER_DISK, CacheTier, GetLoadResponse, TierMoves, Worker
from octavo.wire.requests import BlockUse, ServiceLoad
from octavo.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
OBS = ROOT / "deploy" / "obs"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((OBS / "grafana" / "dashboards" / "octavo.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((OBS / "alerts.yml").read_text(encoding="utf-8"))
SCRAPES = yaml.safe_load((OBS / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
METRIC = re.compile(r"\b(?:octavo|process)_\w+|\bvllm:\w+")
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")


class Frontend(Collector):
    """What a frontend collects with one cell, whose load is known."""

    def __init__(self) -> None:
        cells = cast(SchedulerPool, FakeCells([FakeCell("a", ServiceLoad(1, 2, [BlockUse(16, 100, 50)]))]))
        self._requests = FrontendMetrics("model", Admission(FrontendConfig(Path(), "model", "", ())), list)
        self._cells = CellMetrics("model", cells)

    def collect(self) -> Iterator[Metric]:
        yield from self._requests.collect()
        yield from self._cells.collect()


def scheduler() -> Collector:
    metrics = SchedulerMetrics(lambda: 0.0, RequestSpans(lambda: 0.0))
    disk = CacheTier(tier=TIER_DISK, moves=[TierMoves(to=TIER_CPU, blocks=1)])
    metrics.publish(GetLoadResponse(workers=[Worker(id="w0", model="model", tiers=[disk])]))
    return metrics


def worker() -> Collector:
    return WorkerMetrics(lambda: 0.0)


PROCESSES = {"frontend": Frontend(), "scheduler": scheduler(), "worker": worker()}


def series(process: str) -> set[str]:
    """The names that a scrape of such a process holds."""
    expose(process, PROCESSES[process])
    text = render()[0].decode()
    names = set(re.findall(r"^([a-z0-9_:]+)(?:\{| )", text, flags=re.MULTILINE))
    # Not before there is a model.
    return names | ({"octavo_worker_model_info"} if process == "worker" else set())


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))
    for group in ALERTS["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_what_boards_and_alerts_ask_for_exists(title: str, expression: str) -> None:
    # Labels and jobs bear names of their own.
    named = set(METRIC.findall(re.sub(r'"[^"]*"', "", expression)))
    existing = set().union(*map(series, PROCESSES))
    assert named or expression.startswith("up")
    assert named <= existing


def test_no_two_kinds_of_process_share_a_name_that_a_sum_would_double() -> None:
    everybodys = {"octavo_build_info", "octavo_peak_memory_bytes", "octavo_optional_failures_total"}
    own = {kind: {name for name in series(kind) if not name.startswith("process_")} for kind in PROCESSES}
    assert own["frontend"] & own["scheduler"] == everybodys | LOAD_METRICS
    assert own["scheduler"] & own["worker"] == everybodys
    assert own["worker"] & own["frontend"] == everybodys


def test_what_frontends_and_their_scheduler_both_tell_is_scraped_of_frontends_alone() -> None:
    (job,) = (job for job in SCRAPES if job["job_name"] == "octavo-scheduler")
    (rule,) = job["metric_relabel_configs"]
    assert (rule["source_labels"], rule["action"]) == (["__name__"], "drop")
    # Prometheus anchors the expression at both ends.
    assert {name for name in series("scheduler") if re.fullmatch(rule["regex"], name)} == LOAD_METRICS


def test_other_servers_boards_find_their_names() -> None:
    assert {name for name in series("scheduler") if name.startswith("vllm:")} == {
        *LOAD_METRICS,
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    }
    histograms = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    assert {name for name in series("frontend") if name.startswith("vllm:")} == {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        *LOAD_METRICS,
        *(f"vllm:{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")),
    }


def test_every_metric_of_ours_is_explained_and_named_as_the_rest() -> None:
    for collector in PROCESSES.values():
        for family in collector.collect():
            assert re.fullmatch(r"octavo_[a-z_]+|vllm:[a-z0-9_]+", family.name)
            assert family.documentation.endswith("."), family.name


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_board_uses_the_source_that_is_provisioned() -> None:
    path = OBS / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(path.read_text(encoding="utf-8"))["datasources"]
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert COMPOSE["services"]["prometheus"]["ports"][0].endswith(":9090")


def test_every_service_is_scraped_where_it_listens() -> None:
    found = {name: dns["port"] for job in SCRAPES for dns in job.get("dns_sd_configs", []) for name in dns["names"]}
    services = COMPOSE["services"]
    listening = {
        name: int(environment[variable].rpartition(":")[2])
        for name, service in services.items()
        if isinstance(environment := service.get("environment"), dict)
        for variable in ("OCTAVO_METRICS_LISTEN", "OCTAVO_HTTP_LISTEN")
        if variable in environment
    }
    assert found == listening
    assert set(found) == {"frontend", "scheduler", "worker", "worker-gpu"}
    assert all("internal" in services[name]["networks"] for name in [*found, "prometheus"])


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_watches_is_as_confined_as_what_it_watches(name: str) -> None:
    service: dict[str, Any] = COMPOSE["services"][name]
    watched = COMPOSE["services"]["scheduler"]
    assert service["profiles"] == ["obs"]
    assert all(service[key] == watched[key] for key in ("read_only", "cap_drop", "security_opt", "init", "restart"))
    assert not service["user"].startswith("0")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), "a version, and no moving tag"
    mounted = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./")]
    assert mounted
    assert all((ROOT / path).exists() for path in mounted)
    assert all(volume.endswith(":ro") for volume in service["volumes"] if volume.startswith("./"))


def test_grafana_lets_nobody_in_without_a_password() -> None:
    grafana = COMPOSE["services"]["grafana"]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    check = grafana["entrypoint"][2].replace("$$", "$").replace("exec /run.sh", "echo started")
    for password, status, said in (("", 2, ""), ("secret", 0, "started\n")):
        environment = {"GF_SECURITY_ADMIN_PASSWORD": password, "PATH": "/bin:/usr/bin"}
        result = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, text=True, timeout=60)
        assert (bool(result.returncode), result.stdout) == (bool(status), said)


@promtool
@pytest.mark.parametrize("command", [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"]])
def test_prometheus_accepts_its_files(command: list[str]) -> None:
    result = subprocess.run(["promtool", *command], cwd=OBS, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@promtool
def test_every_question_of_the_board_is_well_formed(tmp_path: Path) -> None:
    asked = [expression.replace("$__rate_interval", "1m") for _, expression in expressions()]
    rules = [{"record": f"question_{n}", "expr": expression} for n, expression in enumerate(asked)]
    path = tmp_path / "questions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}), encoding="utf-8")
    result = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@promtool
def test_alerts_are_raised_when_they_should_be() -> None:
    result = subprocess.run(
        ["promtool", "test", "rules", str(Path(__file__).with_name("alerts_test.yml"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


@promtool
@pytest.mark.parametrize("process", PROCESSES)
def test_prometheus_finds_nothing_wrong_with_our_own_metrics(process: str) -> None:
    registry = CollectorRegistry()
    registry.register(PROCESSES[process])
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=60
    )
    # The colons are those of the names that others look for.
    complaints = [line for line in result.stderr.decode().splitlines() if not line.startswith("vllm:")]
    assert complaints == []
