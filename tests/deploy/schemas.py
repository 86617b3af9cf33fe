"""Validates objects as the API would: those of Kubernetes by its own schemas, others by those in custom_kinds/."""

from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]

from .manifests import Object, documents

# The oldest that knows a pause before SIGTERM without a shell, and the newest whose schema we have.
VERSIONS: Final = ("1.30", kubernetes_validate.latest_version())
Invalid: Final = (kubernetes_validate.ValidationError, jsonschema.ValidationError)
# What is written of every object beside its spec.
_HEAD: Final = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"},
            "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
}


def definitions() -> dict[tuple[str, str], Object]:
    """Returns the definitions of the custom kinds by apiVersion and kind."""
    found = [
        each for path in sorted(Path(__file__).with_name("custom_kinds").glob("*.yaml")) for each in documents(path)
    ]
    return {
        (f"{each['spec']['group']}/{_version(each)['name']}", each["spec"]["names"]["kind"]): each for each in found
    }


def validate(each: Object, version: str = VERSIONS[-1]) -> None:
    """Raises one of `Invalid` for what the API refuses, an unknown field included."""
    if definition := _DEFINITIONS.get((each["apiVersion"], each["kind"])):
        schema = _version(definition)["schema"]["openAPIV3Schema"]
        whole = schema | {"properties": _HEAD | schema["properties"], "required": ["metadata", *schema["required"]]}
        jsonschema.validate(each, _closed(whole), cls=jsonschema.Draft202012Validator)
    else:
        kubernetes_validate.validate(each, version, strict=True)


def _version(definition: Object) -> Object:
    (only,) = definition["spec"]["versions"]
    assert isinstance(only, dict)
    return only


def _closed(schema: Any) -> Any:
    """Returns a definition's schema as one of JSON that takes no field beyond those it names."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(part) for key, part in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    return closed


_DEFINITIONS: Final = definitions()
