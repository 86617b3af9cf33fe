"""The manifests of deploy/kubernetes are what the API takes, fit each other, and give no process more than it needs."""

import json
import re
import shutil
import subprocess
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from octavo.runtime.transport.curve_keys import ROLES, files_of
from octavo.testing.kustomize import Object, documents, find

from .manifests import BUILT, EVERY_POD, EXAMPLES, KUBERNETES, RANKS, ROOT, WHOLE, Pod, of_kind, pods, selects

# The oldest that knows a pause before SIGTERM without a shell, and the newest whose schema we have.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE))
KUBECTL = shutil.which("kubectl")
each_pod = pytest.mark.parametrize("pod", EVERY_POD, ids=lambda pod: f"{pod.owner} {pod.component}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BUILT)
def test_the_api_takes_every_object(name: str, version: str) -> None:
    assert BUILT[name]
    for each in BUILT[name]:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_api_takes_the_examples_and_what_the_components_change() -> None:
    examples = [each for path in EXAMPLES.glob("*.yaml") for each in documents(path) if "externalRules" not in each]
    for each in [*WHOLE, *examples]:
        if each != RANKS:
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)


def test_the_api_refuses_what_is_misspelt() -> None:
    worker = find(BUILT["base"], "Deployment", "octavo-worker")
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(worker | {"spec": {**worker["spec"], "replica": 3}}, VERSIONS[-1], strict=True)


@each_pod
def test_every_template_is_one_of_a_pod(pod: Pod) -> None:
    each = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": pod.labels}, "spec": pod.spec}
    kubernetes_validate.validate(each, VERSIONS[-1], strict=True)


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not installed (Debian: kubernetes-client)")
@pytest.mark.parametrize("name", BUILT)
def test_kustomize_builds_the_same(name: str) -> None:
    command = [str(KUBECTL), "kustomize", str(KUBERNETES / name)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    without_hash = re.sub(r"\b(octavo-settings)-[a-z0-9]{10}\b", r"\1", built)
    assert in_any_order(list(yaml.safe_load_all(without_hash))) == in_any_order(BUILT[name])


def in_any_order(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: in_any_order(value) for key, value in part.items()}
    if isinstance(part, list):
        return sorted((in_any_order(each) for each in part), key=lambda each: json.dumps(each, sort_keys=True))
    return part


# -- what names another ------------------------------------------------------------------------------------------------


def test_no_object_chooses_its_namespace() -> None:
    assert not [each for each in WHOLE if "namespace" in each["metadata"]]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_every_selector_finds_pods(kind: str) -> None:
    for each in of_kind(WHOLE, kind):
        for selector in selectors(each):
            assert any(selects(selector, pod.labels) for pod in pods([*WHOLE, RANKS])), each["metadata"]["name"]


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
    workloads = [*of_kind(WHOLE, "Deployment"), *of_kind(WHOLE, "StatefulSet")]
    for each in workloads:
        chosen = [other for other in workloads if selects(each["spec"]["selector"], pods([other])[0].labels)]
        assert chosen == [each]


def test_what_is_scaled_is_there_and_has_no_number_of_its_own() -> None:
    scalers = of_kind(WHOLE, "HorizontalPodAutoscaler")
    assert scalers
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        assert "replicas" not in find(WHOLE, target["kind"], target["name"])["spec"]


def test_a_budget_lets_pods_go_one_at_a_time() -> None:
    budgets = of_kind(WHOLE, "PodDisruptionBudget")
    assert {each["metadata"]["name"] for each in budgets} == {"octavo-frontend", "octavo-worker"}
    assert all(each["spec"]["maxUnavailable"] == 1 for each in budgets)


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
