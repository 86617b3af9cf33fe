"""What deploy/kubernetes holds, as its tests look at it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.testing.kustomize import Object, build, documents

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
EXAMPLES = KUBERNETES / "examples"
BUILT = {name: build(KUBERNETES / name) for name in ("base", "overlays/cpu-bundled", "overlays/gpu")}
# Every part at once, and beside it a worker of several hosts.
RANKS, RANKS_POLICY = documents(EXAMPLES / "leader-worker-set.yaml")
WHOLE = [*build(KUBERNETES / "components" / "api-keys", BUILT["overlays/gpu"]), RANKS_POLICY]


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


EVERY_POD = [pod for objects in (*BUILT.values(), WHOLE, [RANKS]) for pod in pods(objects)]
