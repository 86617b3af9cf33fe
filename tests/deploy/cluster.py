"""Applies what deploy/kubernetes holds to the cluster that kubectl is set to, as dry runs on its API server, and shows
that the server refuses a field that it does not know: `python -m tests.deploy.cluster`, or `make test-cluster`.

The cluster is left as it was, but for definitions of custom kinds that `--definitions` asked for.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import click
import yaml  # type: ignore[import-untyped]

from .manifests import ALL_COMPONENTS, BUILT, EXAMPLES, Object, documents, kubectl, render

_DEFINITIONS: Final = Path(__file__).with_name("custom_kinds")
_Kind = tuple[str, str]


@click.command()
@click.option("--namespace", default="octavo", show_default=True, help="Where to apply; it must be there.")
@click.option("--definitions", is_flag=True, help="First define the custom kinds that the cluster does not know.")
@click.option(
    "--custom-only", is_flag=True, help="Leave out Kubernetes' own kinds, which this API server does not serve."
)
def main(namespace: str, definitions: bool, custom_only: bool) -> None:
    """Apply every overlay, component and example as a dry run on the server."""
    known = _served()
    if definitions:
        _define(known)
        known = _served()
    failed = False
    for name, objects in _sets(namespace):
        wanted = [each for each in objects if not (custom_only and _is_own(each))]
        if unknown := {_kind(each) for each in wanted} - known:
            click.echo(f"{name}: not served here: {', '.join(sorted(kind for _, kind in unknown))}", err=True)
            failed = True
            wanted = [each for each in wanted if _kind(each) in known]
        if not wanted:
            continue
        done = _apply(wanted, namespace)
        failed |= done.returncode != 0
        verdict = "taken" if done.returncode == 0 else f"refused:\n{done.stderr}"
        click.echo(f"{name}: {len(wanted)} objects of {len({_kind(each) for each in wanted})} kinds: {verdict}")
        failed |= not _refuses_what_is_misspelt(wanted[0], namespace)
    sys.exit(failed)


def _sets(namespace: str) -> Iterable[tuple[str, list[Object]]]:
    for name in BUILT:
        yield name, render(name, namespace=namespace)
    yield "overlays/gpu with all components", render("overlays/gpu", *ALL_COMPONENTS, namespace=namespace)
    yield "overlays/gpu with keda", render("overlays/gpu", "keda", namespace=namespace)
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if objects := [each for each in documents(path) if "kind" in each]:
            yield f"examples/{path.name}", objects


def _kind(each: Object) -> _Kind:
    return each["apiVersion"], each["kind"]


def _is_own(each: Object) -> bool:
    """Whether Kubernetes serves such objects without a definition."""
    return all(_kind(each) != _defines(definition) for definition in _all_definitions())


def _all_definitions() -> list[Object]:
    return [each for path in sorted(_DEFINITIONS.glob("*.yaml")) for each in documents(path)]


def _defines(definition: Object) -> _Kind:
    spec = definition["spec"]
    return f"{spec['group']}/{spec['versions'][0]['name']}", spec["names"]["kind"]


def _served() -> set[_Kind]:
    lines = _run("api-resources", "--no-headers").stdout.splitlines()
    # Name, perhaps short names, version, whether in a namespace, kind.
    return {(fields[-3], fields[-1]) for line in lines if len(fields := line.split()) >= 4}


def _define(known: set[_Kind]) -> None:
    missing = [each for each in _all_definitions() if _defines(each) not in known]
    if missing:
        _run("apply", "--server-side", "--filename=-", given=yaml.safe_dump_all(missing))
        names = [f"crd/{each['metadata']['name']}" for each in missing]
        _run("wait", "--for=condition=Established", "--timeout=60s", *names)
        click.echo(f"defined {', '.join(each['spec']['names']['kind'] for each in missing)}")


def _apply(objects: Sequence[Object], namespace: str) -> "subprocess.CompletedProcess[str]":
    # The server refuses unknown fields of what is applied there, whatever kubectl would look at before.
    options = ("--server-side", "--dry-run=server", "--validate=false", "--field-manager=octavo-tests")
    given = yaml.safe_dump_all(objects)
    return _run("apply", *options, "--namespace", namespace, "--filename=-", given=given, check=False)


def _refuses_what_is_misspelt(each: Object, namespace: str) -> bool:
    if "spec" not in each:
        return True
    done = _apply([each | {"spec": {**each["spec"], "misspelt": 1}}], namespace)
    if done.returncode == 0:
        click.echo(f"{each['kind']}: the server took a field that there is not", err=True)
    return done.returncode != 0


def _run(*arguments: str, given: str = "", check: bool = True) -> "subprocess.CompletedProcess[str]":
    command = [kubectl(), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    if check and done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


if __name__ == "__main__":
    main()
