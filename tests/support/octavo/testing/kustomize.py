"""Implements as much of kustomize as the manifests in deploy/kubernetes use, so that tests need no tool to see what is
applied."""

import copy
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

Object = dict[str, Any]

_KNOWN: Final = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "patches"}
# Lists that a patch merges, and what names their elements; others it replaces.
_MERGED_BY: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}


def documents(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def build(directory: Path, below: list[Object] | None = None) -> list[Object]:
    """Builds the objects of the kustomization in `directory`; of a component, the objects `below` with the component's
    changes.

    Generated ConfigMaps keep their names, without a hash. Raises `ValueError` for what is not understood.
    """
    (settings,) = documents(directory / "kustomization.yaml")
    if unknown := settings.keys() - _KNOWN:
        raise ValueError(f"{directory}: {', '.join(sorted(unknown))}: not understood here")
    objects = copy.deepcopy(below or [])
    for name in settings.get("resources", []):
        path = directory / name
        objects += build(path) if path.is_dir() else documents(path)
    for name in settings.get("components", []):
        objects = build(directory / name, objects)
    for entry in settings.get("configMapGenerator", []):
        _generate(objects, entry)
    for entry in settings.get("patches", []):
        (patch,) = documents(directory / entry["path"])
        _patch(objects, patch, entry.get("target"))
    return objects


def find(objects: list[Object], kind: str, name: str) -> Object:
    """Raises `LookupError` if it is not there."""
    for found in objects:
        if (found["kind"], found["metadata"]["name"]) == (kind, name):
            return found
    raise LookupError(f"no {kind} is called {name}")


def _generate(objects: list[Object], entry: Object) -> None:
    data = dict(literal.split("=", 1) for literal in entry["literals"])
    if entry.get("behavior") == "merge":
        find(objects, "ConfigMap", entry["name"])["data"] |= data
        return
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry["name"]}, "data": data})


def _patch(objects: list[Object], patch: Object, target: Object | None) -> None:
    """Changes what `target` says, which is known by its kind; or else the object that bears the patch's name."""
    if target is None:
        changed = [find(objects, patch["kind"], patch["metadata"]["name"])]
    else:
        changed = [each for each in objects if each["kind"] == target["kind"]]
    if not changed:
        raise LookupError(f"nothing is a {patch['kind']}")
    for each in changed:
        _merge(each, {key: value for key, value in patch.items() if key != "metadata"})


def _merge(into: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        elif key in _MERGED_BY:
            into[key] = _merged_list(into.get(key, []), value, _MERGED_BY[key])
        else:
            into[key] = copy.deepcopy(value)


def _merged_list(old: list[Object], patches: list[Object], named_by: str) -> list[Object]:
    merged = {element[named_by]: element for element in old}
    for patch in patches:
        name = patch[named_by]
        if patch.get("$patch") == "delete":
            del merged[name]
        else:
            _merge(merged.setdefault(name, {}), patch)
    return list(merged.values())
