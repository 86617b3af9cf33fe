"""What the components tell other operators of a cluster (autoscalers, Prometheus, gateways) is true of Octavo."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from octavo.frontend.stream.metrics import LOAD_METRICS
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics
from octavo.v1.admin_pb2 import GetLoadResponse, Worker

from . import prometheus_rule
from .manifests import (
    EVERY_POD,
    EXAMPLES,
    RANKS,
    ROOT,
    WHOLE,
    WITH_KEDA,
    Object,
    Pod,
    documents,
    find,
    of_kind,
    own_settings,
    pods,
    selects,
    templates,
)

# -- autoscaling -------------------------------------------------------------------------------------------------------

(ADAPTER,) = documents(EXAMPLES / "prometheus-adapter.yaml")
RULES = {
    rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0]: rule for rule in ADAPTER["externalRules"]
}


def scaler(name: str) -> Object:
    spec: Object = find(WHOLE, "HorizontalPodAutoscaler", name)["spec"]
    return spec


def scaled(name: str) -> Object:
    spec: Object = find(WITH_KEDA, "ScaledObject", name)["spec"]
    return spec


def test_autoscalers_ask_for_metrics_that_the_scheduler_has() -> None:
    asked = {
        metric["external"]["metric"]["name"]
        for each in of_kind(WHOLE, "HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
        if metric["type"] == "External"
    }
    assert asked == RULES.keys()
    metrics = SchedulerMetrics(lambda: 0.0, RequestSpans(lambda: 0.0))
    metrics.publish(GetLoadResponse(workers=[Worker(id="w")]))
    exposed = {sample.name for family in metrics.collect() for sample in family.samples}
    for rule in RULES.values():
        read = re.findall(r"\boctavo_\w+", rule["seriesQuery"] + rule["metricsQuery"])
        assert len(read) > 1
        assert set(read) <= exposed


def test_keda_asks_prometheus_for_what_the_adapter_gives() -> None:
    """In the namespace of which docs/kubernetes.md speaks, for it knows none by itself."""
    asked = [trigger["metadata"]["query"] for trigger in scaled("octavo-worker")["triggers"]]
    assert asked == [
        rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="octavo"') for rule in RULES.values()
    ]
    # A count that is not there is no zero, upon which workers would go.
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in scaled("octavo-worker")["triggers"]} == {"false"}


@pytest.mark.parametrize("name", ["octavo-worker", "octavo-frontend"])
def test_both_autoscalers_want_the_same(name: str) -> None:
    ours, kedas = scaler(name), scaled(name)
    assert (kedas["minReplicaCount"], kedas["maxReplicaCount"]) == (ours["minReplicas"], ours["maxReplicas"])
    assert kedas["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == ours["behavior"]
    for metric, trigger in zip(ours["metrics"], kedas["triggers"], strict=True):
        target = metric["external" if metric["type"] == "External" else "resource"]["target"]
        given = trigger["metadata"]
        assert trigger["metricType"] == target["type"]
        assert number(given.get("threshold") or given["value"]) == number(
            target.get("value") or target.get("averageValue") or target["averageUtilization"]
        )


# What the scheduler shows for five minutes, and what autoscalers read from it.
SHOWN = {
    'octavo_waiting_tokens{namespace="octavo"}': 9000,
    'octavo_worker_token_rate{namespace="octavo", worker="a"}': 100,
    # It has just come, and computed nothing yet.
    'octavo_worker_token_rate{namespace="octavo", worker="b"}': 0,
    'octavo_blocks_referenced{namespace="octavo", worker="a"}': 75,
    'octavo_blocks{namespace="octavo", worker="a"}': 100,
    'octavo_blocks_referenced{namespace="octavo", worker="b"}': 50,
    'octavo_blocks{namespace="octavo", worker="b"}': 200,
    'octavo_waiting_tokens{namespace="other"}': 1_000_000,
}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize(("without", "read"), [("nothing", [45, 1.0]), ("octavo_worker_token_rate", [None, 1.0])])
def test_autoscalers_read_seconds_and_full_workers(without: str, read: list[float | None], tmp_path: Path) -> None:
    asked = [trigger["metadata"]["query"] for trigger in scaled("octavo-worker")["triggers"]]
    shown = [
        {"series": series, "values": f"{value}x5"} for series, value in SHOWN.items() if not series.startswith(without)
    ]
    questions = [
        {
            "expr": question,
            "eval_time": "5m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for question, value in zip(asked, read, strict=True)
    ]
    tests = {"tests": [{"interval": "1m", "input_series": shown, "promql_expr_test": questions}]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests), encoding="utf-8")
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def number(quantity: str | int) -> float:
    """Reads a quantity of the API, of which only thousandths are understood."""
    text = str(quantity)
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


# -- Prometheus --------------------------------------------------------------------------------------------------------


def test_the_alerts_are_those_of_deploy_obs() -> None:
    assert prometheus_rule.RULE.read_text(encoding="utf-8") == prometheus_rule.rule()
    (rule,) = of_kind(WHOLE, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(prometheus_rule.ALERTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("pod", [pod for pod in EVERY_POD if pod.talks], ids=lambda pod: f"{pod.owner} {pod.component}")
def test_every_pod_is_scraped_once_and_where_its_annotations_say(pod: Pod) -> None:
    (monitor,) = of_kind(WHOLE, "PodMonitor")
    assert selects(monitor["spec"]["selector"], pod.labels)
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    (port,) = (port["containerPort"] for port in pod.container["ports"] if port["name"] in scraped)
    assert port == int(pod.annotations["prometheus.io/port"])


def test_a_pods_job_is_called_as_alerts_and_board_call_it() -> None:
    (monitor,) = of_kind(WHOLE, "PodMonitor")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
        jobs = {relabeling["replacement"].replace("$1", pod.component) for pod in pods(WHOLE)}
        assert jobs == {job["job_name"] for job in scrapes()} - {"prometheus"}


def test_what_frontends_tell_of_the_scheduler_is_not_scraped_of_it_too() -> None:
    (monitor,) = of_kind(WHOLE, "PodMonitor")
    relabelings = {each["port"]: each.get("metricRelabelings", []) for each in monitor["spec"]["podMetricsEndpoints"]}
    (compose,) = (job["metric_relabel_configs"] for job in scrapes() if job["job_name"] == "octavo-scheduler")
    ours = [
        {"source_labels" if key == "sourceLabels" else key: value for key, value in each.items()}
        for each in relabelings["metrics"]
    ]
    assert ours == compose
    assert relabelings["http"] == []


def scrapes() -> list[Object]:
    loaded: list[Object] = documents(ROOT / "deploy" / "obs" / "prometheus.yml")[0]["scrape_configs"]
    return loaded


def test_the_board_is_that_of_deploy_obs_and_found_by_grafanas_sidecar() -> None:
    board = find(WHOLE, "ConfigMap", "octavo-board")
    assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
    path = ROOT / "deploy" / "obs" / "grafana" / "dashboards" / "octavo.json"
    assert board["data"] == {"octavo.json": path.read_text(encoding="utf-8")}


# -- the gateway -------------------------------------------------------------------------------------------------------

(POOL,) = of_kind(WHOLE, "InferencePool")
(PICKER,) = (pod for pod in templates(WHOLE) if pod not in pods(WHOLE))


def test_the_pool_holds_the_frontends_alone_at_their_http_port() -> None:
    chosen = [pod for pod in templates([*WHOLE, RANKS]) if selects(POOL["spec"]["selector"], pod.labels)]
    (frontend,) = chosen
    assert frontend.component == "frontend"
    ports = {port["name"]: port["containerPort"] for port in frontend.container["ports"]}
    assert POOL["spec"]["targetPorts"] == [{"number": ports["http"]}]


def test_the_pools_picker_is_the_one_that_watches_the_pool() -> None:
    ref = POOL["spec"]["endpointPickerRef"]
    service = find(WHOLE, "Service", ref["name"])["spec"]
    assert selects({"matchLabels": service["selector"]}, PICKER.labels)
    assert [port["port"] for port in service["ports"]] == [ref["port"]["number"]]
    given = dict(argument.removeprefix("--").split("=", 1) for argument in PICKER.container["args"])
    assert given["pool-name"] == POOL["metadata"]["name"]
    assert POOL["apiVersion"] == f"{given['pool-group']}/v1"


def test_the_picker_reads_the_load_without_a_key_at_the_port_of_requests() -> None:
    (frontend,) = (pod for pod in pods(WHOLE) if pod.component == "frontend")
    assert own_settings(frontend.container)["OCTAVO_PUBLIC_LOAD_METRICS"] == "true"
    # What the picker of this version asks for unless it is told otherwise.
    asked = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert {f"vllm:{name}" for name in asked} == set(LOAD_METRICS)
    assert not [given for given in PICKER.container["args"] if "-metric=vllm" in given]


def test_the_pickers_plugins_are_those_it_is_given() -> None:
    given = dict(argument.removeprefix("--").split("=", 1) for argument in PICKER.container["args"])
    folder, _, name = given["config-file"].rpartition("/")
    (mount,) = PICKER.container["volumeMounts"]
    (volume,) = PICKER.spec["volumes"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], folder)
    settings = yaml.safe_load(find(WHOLE, "ConfigMap", volume["configMap"]["name"])["data"][name])
    declared = {plugin["type"] for plugin in settings["plugins"]}
    assert declared == {each["pluginRef"] for profile in settings["schedulingProfiles"] for each in profile["plugins"]}


def test_the_picker_may_read_what_it_watches_and_has_no_more_rights_than_other_pods() -> None:
    (role,) = of_kind(WHOLE, "Role")
    (binding,) = of_kind(WHOLE, "RoleBinding")
    (account,) = of_kind(WHOLE, "ServiceAccount")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    watched = {(group, name) for rule in role["rules"] for group in rule["apiGroups"] for name in rule["resources"]}
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= watched
    assert {each["apiVersion"].partition("/")[0] for each in of_kind(WHOLE, "InferenceObjective")} <= {
        group for group, _ in watched
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    assert PICKER.spec["serviceAccountName"] == account["metadata"]["name"]
    (frontend,) = (pod for pod in pods(WHOLE) if pod.component == "frontend")
    assert PICKER.container["securityContext"] == frontend.container["securityContext"]
    assert PICKER.spec["securityContext"]["runAsNonRoot"]
    assert PICKER.spec["terminationGracePeriodSeconds"] >= frontend.spec["terminationGracePeriodSeconds"]


def test_objectives_and_route_lead_to_the_pool_and_the_route_hangs_on_the_example() -> None:
    name = POOL["metadata"]["name"]
    assert {each["spec"]["poolRef"]["name"] for each in of_kind(WHOLE, "InferenceObjective")} == {name}
    (route,) = of_kind(WHOLE, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    group = POOL["apiVersion"].partition("/")[0]
    assert rule["backendRefs"] == [{"group": group, "kind": "InferencePool", "name": name}]
    # No limit, for streams: some gateways have one of 15 seconds otherwise.
    assert set(rule["timeouts"].values()) == {"0s"}
    (gateway,) = documents(EXAMPLES / "gateway.yaml")
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]


# -- priorities --------------------------------------------------------------------------------------------------------


def test_every_pod_has_a_class_of_the_component_and_workers_go_first() -> None:
    classes = {each["metadata"]["name"]: each["value"] for each in of_kind(WHOLE, "PriorityClass")}
    assert not [each for each in of_kind(WHOLE, "PriorityClass") if each.get("globalDefault")]
    given = {pod.component: classes[pod.spec["priorityClassName"]] for pod in pods(WHOLE)}
    assert given["scheduler"] == given["frontend"] > given["worker"] > 0
