"""What deploy/kubernetes holds, as kustomize renders it and as its tests look at it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

Object = dict[str, Any]

PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
# What LeaderWorkerSet puts into the environment.
OF_THE_GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "octavo-0.octavo"}

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
COMPONENTS: Final = KUBERNETES / "components"
EXAMPLES: Final = KUBERNETES / "examples"


def documents(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def render(resource: str, *components: str, namespace: str = "") -> list[Object]:
    """Renders a folder of deploy/kubernetes together with components, by their names, as `kubectl kustomize` does for
    an operator's own kustomization.

    Generated ConfigMaps lose the hash in their names. Raises `RuntimeError` with what kubectl says.
    """
    with tempfile.TemporaryDirectory() as scratch:
        kustomization: Object = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(KUBERNETES / resource, Path(scratch).resolve())],
            "components": [os.path.relpath(COMPONENTS / name, Path(scratch).resolve()) for name in components],
        }
        if namespace:
            kustomization["namespace"] = namespace
        Path(scratch, "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return built(Path(scratch))


def built(directory: Path) -> list[Object]:
    """Like `render`, of any kustomization."""
    command = [kubectl(), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    without_hash = re.sub(r"\b(octavo-settings|octavo-endpoint-picker)-[a-z0-9]{10}\b", r"\1", done.stdout)
    return list(yaml.safe_load_all(without_hash))


@cache
def kubectl() -> str:
    """Returns the environment's kubectl, or else the machine's. Raises `RuntimeError` if there is none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if found := shutil.which("kubectl", path=places):
        return found
    raise RuntimeError("kubectl is not installed: `make env` installs it on Linux, elsewhere see kubernetes.io")


def find(objects: list[Object], kind: str, name: str) -> Object:
    """Raises `LookupError` if it is not there."""
    for found in objects:
        if (found["kind"], found["metadata"]["name"]) == (kind, name):
            return found
    raise LookupError(f"no {kind} is called {name}")


BUILT: Final = {name: render(name) for name in ("base", "overlays/cpu-bundled", "overlays/gpu")}
ALL_COMPONENTS: Final = ("api-keys", "autoscaling", "gateway", "kv-events", "monitoring", "priorities")
# Every part at once, and beside it a worker of several hosts.
RANKS, RANKS_POLICY = documents(EXAMPLES / "leader-worker-set.yaml")
WHOLE: Final = [*render("overlays/gpu", *ALL_COMPONENTS), RANKS_POLICY]
# Of two autoscalers only one can be had.
WITH_KEDA: Final = render("overlays/gpu", "keda")


@dataclass(frozen=True)
class Pod:
    """A pod template: `owner` is the object that it is part of."""

    owner: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Object

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def talks(self) -> bool:
        """Whether it talks with other kinds of process: of the ranks of a worker only the first does."""
        return "keys" in {volume["name"] for volume in self.spec["volumes"]}

    @property
    def container(self) -> Object:
        (only,) = self.spec["containers"]
        assert isinstance(only, dict)
        return only

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pods(objects: list[Object]) -> list[Pod]:
    """Returns Octavo's own pods."""
    return [pod for pod in templates(objects) if pod.labels["app.kubernetes.io/name"] == "octavo"]


def templates(objects: list[Object]) -> list[Pod]:
    """Returns all pods, the endpoint picker's too."""
    return [pod for each in objects for pod in _templates(each)]


def _templates(each: Object) -> Iterator[Pod]:
    spec = each.get("spec", {})
    parts = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), parts.get("leaderTemplate"), parts.get("workerTemplate")):
        if template:
            metadata = template["metadata"]
            owner = f"{each['kind']} {each['metadata']['name']}"
            yield Pod(owner, metadata["labels"], metadata.get("annotations", {}), template["spec"])


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector matches; of its expressions only `In` is understood."""
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
        if expression["operator"] == "In" or _unknown(expression)
    )


def _unknown(expression: Object) -> bool:
    raise ValueError(f"operator {expression['operator']} is not understood here")


def arguments(container: Object) -> list[str]:
    """With the command's name, as the image or the manifest gives it."""
    given = container.get("args", [container["name"]])
    return [re.sub(r"\$\((\w+)\)", lambda match: OF_THE_GROUP[match[1]], argument) for argument in given]


def own_settings(container: Object) -> dict[str, str]:
    """The variables that only this container gets; what is known only in a cluster is its field's name."""
    return {each["name"]: each.get("value") or str(each.get("valueFrom")) for each in container.get("env", [])}


def shared_settings(container: Object, objects: list[Object]) -> dict[str, str]:
    """The variables that its ConfigMaps give it."""
    names = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    return {key: value for name in names for key, value in find(objects, "ConfigMap", name)["data"].items()}


EVERY_POD = [pod for objects in (*BUILT.values(), WHOLE, [RANKS]) for pod in pods(objects)]
