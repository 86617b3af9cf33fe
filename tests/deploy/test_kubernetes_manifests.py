"""The manifests of deploy/kubernetes are what the API takes, fit each other, and give no process more than it needs."""

import re

import pytest

from octavo.runtime.transport.curve_keys import ROLES, files_of

from .manifests import (
    ALL_COMPONENTS,
    BUILT,
    COMPONENTS,
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
    pods,
    selects,
    templates,
)
from .schemas import VERSIONS, Invalid, validate

STAGES = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE))
SCALED = ("octavo-frontend", "octavo-worker")
each_pod = pytest.mark.parametrize("pod", EVERY_POD, ids=lambda pod: f"{pod.owner} {pod.component}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BUILT)
def test_the_api_takes_every_object(name: str, version: str) -> None:
    assert BUILT[name]
    for each in BUILT[name]:
        validate(each, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_takes_the_examples_and_what_the_components_change(version: str) -> None:
    examples = [each for path in EXAMPLES.glob("*.yaml") for each in documents(path) if "externalRules" not in each]
    assert WHOLE
    assert WITH_KEDA
    assert examples
    for each in [*WHOLE, *WITH_KEDA, *examples]:
        validate(each, version)


def test_every_component_is_in_what_is_tested() -> None:
    assert {path.name for path in COMPONENTS.iterdir()} == {*ALL_COMPONENTS, "keda"}


CHANGES = {
    "Deployment": ("spec", "replica", "replica"),
    "PodMonitor": ("spec", "selektor", "selektor"),
    "InferencePool": ("spec", "targetPortNumber", "targetPortNumber"),
    "HTTPRoute": ("spec", "parentRef", "parentRef"),
    "PrometheusRule": ("spec", "group", "group"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_api_refuses_what_is_misspelt(kind: str) -> None:
    part, name, complaint = CHANGES[kind]
    first = of_kind(WHOLE, kind)[0]
    with pytest.raises(Invalid, match=complaint):
        validate(first | {part: {**first[part], name: 3}})


def test_the_api_refuses_a_pool_without_a_port_and_a_scaler_without_a_target() -> None:
    (pool,) = of_kind(WHOLE, "InferencePool")
    with pytest.raises(Invalid, match="targetPorts"):
        validate(pool | {"spec": {name: part for name, part in pool["spec"].items() if name != "targetPorts"}})
    scaler = find(WITH_KEDA, "ScaledObject", "octavo-worker")
    with pytest.raises(Invalid, match="scaleTargetRef"):
        validate(scaler | {"spec": {"triggers": scaler["spec"]["triggers"]}})


@each_pod
def test_every_template_is_one_of_a_pod(pod: Pod) -> None:
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": pod.labels}, "spec": pod.spec})


# -- what names another ------------------------------------------------------------------------------------------------


def test_no_object_chooses_its_namespace() -> None:
    assert not [each for each in WHOLE if "namespace" in each["metadata"]]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_every_selector_finds_pods(kind: str) -> None:
    for each in of_kind(WHOLE, kind):
        for selector in selectors(each):
            assert any(selects(selector, pod.labels) for pod in templates([*WHOLE, RANKS])), each["metadata"]["name"]


def selectors(each: Object) -> list[Object]:
    """Those of pods in our own namespace."""
    spec = each["spec"]
    if each["kind"] == "Service":
        return [{"matchLabels": spec["selector"]}]
    if each["kind"] != "NetworkPolicy":
        return [spec["selector"]]
    peers = [peer for rule in spec.get("ingress", []) for peer in rule.get("from", [])]
    peers += [peer for rule in spec.get("egress", []) for peer in rule["to"]]
    return [spec["podSelector"], *(peer["podSelector"] for peer in peers if "namespaceSelector" not in peer)]


def test_every_workload_selects_its_own_pods_and_no_others() -> None:
    """Autoscalers count the pods that a Deployment's selector finds, those of ranks beside it too."""
    others = templates([*WHOLE, RANKS])
    for each in [*of_kind(WHOLE, "Deployment"), *of_kind(WHOLE, "StatefulSet")]:
        (own,) = templates([each])
        assert [pod for pod in others if selects(each["spec"]["selector"], pod.labels)] == [own]


def test_what_is_scaled_is_there_and_has_no_number_of_its_own() -> None:
    for objects, kind in ((WHOLE, "HorizontalPodAutoscaler"), (WITH_KEDA, "ScaledObject")):
        targets = [each["spec"]["scaleTargetRef"] for each in of_kind(objects, kind)]
        scaled = [find(objects, target.get("kind", "Deployment"), target["name"]) for target in targets]
        assert scaled == [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] in SCALED]
        assert not [each for each in scaled if "replicas" in each["spec"]]


def test_a_budget_lets_pods_go_one_at_a_time() -> None:
    budgets = of_kind(WHOLE, "PodDisruptionBudget")
    assert {each["metadata"]["name"] for each in budgets} == {"octavo-frontend", "octavo-worker"}
    assert all(each["spec"]["maxUnavailable"] == 1 for each in budgets)


@pytest.mark.parametrize(("component", "over"), [("frontend", ["zone", "hostname"]), ("worker", ["hostname"])])
def test_pods_of_a_kind_are_spread(component: str, over: list[str]) -> None:
    (pod,) = (pod for pod in pods(BUILT["base"]) if pod.component == component)
    constraints = pod.spec["topologySpreadConstraints"]
    assert [each["topologyKey"].rpartition("/")[2] for each in constraints] == over
    for each in constraints:
        assert selects(each["labelSelector"], pod.labels)
        # A full node or zone must not keep pods from starting.
        assert each["whenUnsatisfiable"] == "ScheduleAnyway"


def test_there_is_one_scheduler_and_its_service_is_headless() -> None:
    scheduler = find(WHOLE, "StatefulSet", "octavo-scheduler")["spec"]
    service = find(WHOLE, "Service", scheduler["serviceName"])["spec"]
    assert scheduler["replicas"] == 1
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


@each_pod
def test_what_is_mounted_is_a_volume_of_the_pod(pod: Pod) -> None:
    mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod.spec["volumes"]}


@each_pod
def test_settings_and_models_come_from_objects_that_are_there(pod: Pod) -> None:
    claims = [volume["persistentVolumeClaim"] for volume in pod.spec["volumes"] if "persistentVolumeClaim" in volume]
    (claim,) = documents(EXAMPLES / "models-volume.yaml")
    assert all(each == {"claimName": claim["metadata"]["name"], "readOnly": True} for each in claims)
    for source in pod.container.get("envFrom", []):
        assert find(WHOLE, "ConfigMap", source["configMapRef"]["name"])["data"]


@each_pod
def test_every_image_is_a_target_of_the_dockerfile(pod: Pod) -> None:
    assert {container["image"].removeprefix("octavo-") for container in pod.containers} <= STAGES
    assert all(container["image"].startswith(f"octavo-{pod.component}") for container in pod.spec["containers"])


# -- rights ------------------------------------------------------------------------------------------------------------


@each_pod
def test_no_pod_has_more_rights_than_it_needs(pod: Pod) -> None:
    assert pod.spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & pod.spec.keys()
    user = pod.spec["securityContext"]
    assert user["runAsNonRoot"]
    assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"] == 10001
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not [volume for volume in pod.spec["volumes"] if "hostPath" in volume]


@each_pod
def test_no_container_has_more_rights_than_it_needs(pod: Pod) -> None:
    for container in pod.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


@each_pod
def test_a_pod_holds_the_keys_that_its_process_reads_and_no_others(pod: Pod) -> None:
    (role,) = (role for role in ROLES if role == pod.component)
    for secret in (volume["secret"] for volume in pod.spec["volumes"] if volume["name"] == "keys"):
        assert (secret["secretName"], secret["defaultMode"]) == ("octavo-keys", 0o400)
        assert sorted(item["path"] for item in secret["items"]) == sorted(files_of(role))
        assert all(item["key"] == item["path"] for item in secret["items"])


def test_every_pod_but_that_of_a_rank_that_follows_has_keys() -> None:
    without = [pod for pod in EVERY_POD if not pod.talks]
    assert without == [pods([RANKS])[1]]
    assert not any(each["name"] == "OCTAVO_WORKER_ENDPOINT" for pod in without for each in pod.container["env"])


@each_pod
def test_no_service_adds_variables_that_look_like_settings(pod: Pod) -> None:
    assert pod.spec["enableServiceLinks"] is False
