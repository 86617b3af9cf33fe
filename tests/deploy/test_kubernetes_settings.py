"""What the manifests of deploy/kubernetes tell the processes is what these take, listen on, and connect to."""

import re
from itertools import product

import click
import pytest

from octavo.frontend.cli.frontend import frontend
from octavo.frontend.grpc import service as grpc_service
from octavo.runtime.models.directory import BUNDLED_MODEL
from octavo.scheduler.cli.serve import scheduler
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.server.health import SERVICE as ADMIN_SERVICE
from octavo.worker import health
from octavo.worker.cli.prepare import prepare_model
from octavo.worker.cli.worker import worker

from .manifests import (
    BUILT,
    EVERY_POD,
    PROBES,
    RANKS,
    WHOLE,
    Object,
    Pod,
    arguments,
    find,
    of_kind,
    own_settings,
    pods,
    selects,
    shared_settings,
    templates,
)

COMMANDS = {"frontend": frontend, "scheduler": scheduler, "worker": worker, "prepare-model": prepare_model}
READY = {
    "frontend": grpc_service.SERVICE_NAME,
    "scheduler": ADMIN_SERVICE,
    "worker": health.READY_SERVICE,
}
TALKING = [pod for pod in EVERY_POD if pod.talks]
each_pod = pytest.mark.parametrize("pod", EVERY_POD, ids=lambda pod: f"{pod.owner} {pod.component}")
each_talking = pytest.mark.parametrize("pod", TALKING, ids=lambda pod: f"{pod.owner} {pod.component}")


def options(command: click.Command) -> dict[str, click.Parameter]:
    return {str(option.envvar): option for option in command.params if option.envvar}


# The variables of the dispatcher itself.
OF_ALL = {"OCTAVO_LOG_FORMAT", "OCTAVO_LOG_LEVEL"}


@each_pod
def test_every_variable_is_one_that_the_command_reads(pod: Pod) -> None:
    for container in pod.containers:
        command = COMMANDS[arguments(container)[0]]
        assert own_settings(container).keys() - OF_ALL <= options(command).keys()


def test_every_shared_setting_is_read_by_a_command() -> None:
    read = {name for command in COMMANDS.values() for name in options(command)}
    for objects in BUILT.values():
        assert find(objects, "ConfigMap", "octavo-settings")["data"].keys() - OF_ALL <= read


@each_pod
def test_every_value_is_one_that_its_option_takes(pod: Pod) -> None:
    command = COMMANDS[arguments(pod.container)[0]]
    context = click.Context(command, info_name=command.name)
    for name, value in (shared_settings(pod.container, WHOLE) | own_settings(pod.container)).items():
        option = options(command).get(name)
        if option is None or isinstance(option.type, click.Path):
            continue
        given = option.type.split_envvar_value(value) if option.multiple else value
        converted = option.type_cast_value(context, given)
        if option.callback:
            option.callback(context, option, converted)


@each_pod
def test_every_argument_is_one_that_the_command_takes(pod: Pod) -> None:
    for container in pod.containers:
        name, *rest = arguments(container)
        COMMANDS[name].make_parser(click.Context(COMMANDS[name])).parse_args(rest)


def test_the_bundled_model_is_the_one_that_is_prepared() -> None:
    objects = BUILT["overlays/cpu-bundled"]
    assert find(objects, "ConfigMap", "octavo-settings")["data"]["OCTAVO_MODEL"] == BUNDLED_MODEL
    (prepared, *_), (read, *_) = (
        [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "models"]
        for container in pods(objects)[1].containers
    )
    assert prepared == read


@each_talking
def test_keys_are_read_from_where_they_are_mounted(pod: Pod) -> None:
    settings = shared_settings(pod.container, WHOLE) | own_settings(pod.container)
    mounted = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    assert settings["OCTAVO_CURVE_KEYS"] == mounted["keys"]


def test_ranks_on_gpus_are_told_their_memory_and_alike() -> None:
    """They do not measure it, and refuse to start with different options."""
    leader, follower = (own_settings(pod.container) for pod in pods([RANKS]))
    assert leader["OCTAVO_KV_CACHE_MEMORY"]
    alike = leader.keys() & follower.keys() - {"OCTAVO_WORKER_ID"}
    assert {name: leader[name] for name in alike} == follower


# -- ports -------------------------------------------------------------------------------------------------------------


def bound(container: Object) -> set[int]:
    """Ports that the process listens on, beyond its pod's loopback."""
    given = [*own_settings(container).values(), *arguments(container)]
    ports = {int(match[1]) for value in given if (match := re.fullmatch(r"(?:tcp://)?(?:0\.0\.0\.0|\*):(\d+)", value))}
    return ports | {int(match[1]) for value in given if (match := re.match(r"--tp-rendezvous=\S+:(\d+)$", value))}


def sought(container: Object) -> set[tuple[str, int]]:
    """Names of services and ports that the process connects to."""
    found = (re.fullmatch(r"(?:tcp://)?(octavo-\w+):(\d+)", value) for value in own_settings(container).values())
    return {(match[1], int(match[2])) for match in found if match}


@each_talking
def test_what_is_declared_is_what_the_process_listens_on(pod: Pod) -> None:
    declared = {port["containerPort"] for port in pod.container["ports"]}
    assert declared == bound(pod.container)
    assert int(pod.annotations["prometheus.io/port"]) in declared


@each_pod
def test_probes_ask_for_what_the_process_serves(pod: Pod) -> None:
    asked = {name: pod.container[name]["grpc"] for name in PROBES if name in pod.container}
    assert {probe["port"] for probe in asked.values()} <= bound(pod.container)
    ready = {"readinessProbe": READY[pod.component]} if pod.talks else {}
    services = {name: probe.get("service", "") for name, probe in asked.items()}
    assert services == {"startupProbe": "", "livenessProbe": "", **ready}


def test_services_lead_to_ports_of_their_pods() -> None:
    for service in of_kind(WHOLE, "Service"):
        (pod,) = (pod for pod in templates(WHOLE) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels))
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])


@each_pod
def test_processes_connect_to_services_that_are_there(pod: Pod) -> None:
    for name, port in sought(pod.container):
        assert port in {each["port"] for each in find(WHOLE, "Service", name)["spec"]["ports"]}


# -- network policies --------------------------------------------------------------------------------------------------

POLICIES = of_kind(WHOLE, "NetworkPolicy")


def test_the_network_carries_what_processes_connect_to_and_nothing_else() -> None:
    ours = pods(WHOLE)
    carried = {
        (client.component, f"octavo-{server.component}", port)
        for client, server in product(ours, ours)
        for port in bound(server.container)
        if lets("egress", "to", client, server, port) and lets("ingress", "from", server, client, port)
    }
    # The frontends' public ports are open to all, but no process of ours may go there.
    assert carried == {(pod.component, *place) for pod in ours for place in sought(pod.container)}
    assert len(carried) == 3


def test_only_the_ports_of_frontends_for_the_public_and_of_the_picker_for_gateways_are_open_to_all() -> None:
    public = {port["port"] for port in find(WHOLE, "Service", "octavo-frontend")["spec"]["ports"]}
    opened = {
        (each["metadata"]["name"], port["port"])
        for each in POLICIES
        for rule in each["spec"].get("ingress", [])
        if "from" not in rule
        for port in rule["ports"]
    }
    (picker,) = find(WHOLE, "Service", "octavo-endpoint-picker")["spec"]["ports"]
    assert opened == {("octavo-endpoint-picker", picker["port"]), *(("octavo-frontend", port) for port in public)}


def test_every_pod_is_shut_unless_a_policy_opens_it() -> None:
    shut = find(WHOLE, "NetworkPolicy", "octavo-deny-all")["spec"]
    assert shut.keys() == {"podSelector", "policyTypes"}
    assert set(shut["policyTypes"]) == {"Ingress", "Egress"}
    assert all(selects(shut["podSelector"], pod.labels) for pod in EVERY_POD)


def test_metrics_are_for_namespaces_with_the_label_alone() -> None:
    policy = find(WHOLE, "NetworkPolicy", "octavo-metrics")["spec"]
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert source.keys() == {"namespaceSelector"}
    for pod in TALKING:
        if selects(policy["podSelector"], pod.labels):
            assert [port["port"] for port in rule["ports"]] == [int(pod.annotations["prometheus.io/port"])]


def test_ranks_reach_each_other_and_the_leader_the_scheduler() -> None:
    leader, follower = pods([RANKS])
    (server,) = (pod for pod in pods(WHOLE) if pod.component == "scheduler")
    assert lets("egress", "to", follower, leader, 29500)
    assert lets("ingress", "from", leader, follower, 29500)
    assert all(lets("egress", "to", leader, server, port) for _, port in sought(leader.container))
    outsider = next(pod for pod in pods(WHOLE) if pod.component == "frontend")
    assert not lets("ingress", "from", leader, outsider, 29500)


def lets(direction: str, peers: str, pod: Pod, peer: Pod, port: int) -> bool:
    """Whether a policy for `pod` lets it have traffic with `peer` in that direction; `port` is the server's."""
    return any(
        _covers(rule, peers, peer, port)
        for each in POLICIES
        if selects(each["spec"]["podSelector"], pod.labels)
        for rule in each["spec"].get(direction, [])
    )


def _covers(rule: Object, peers: str, peer: Pod, port: int) -> bool:
    near = [each["podSelector"] for each in rule.get(peers, []) if "namespaceSelector" not in each]
    whoever = peers not in rule
    ports = [each["port"] for each in rule.get("ports", [])]
    return (whoever or any(selects(each, peer.labels) for each in near)) and (not ports or port in ports)


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_frontend_is_given_the_time_that_it_drains_for() -> None:
    (pod,) = (pod for pod in pods(WHOLE) if pod.component == "frontend")
    pause = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(own_settings(pod.container)["OCTAVO_DRAIN_TIMEOUT"])
    assert pod.spec["terminationGracePeriodSeconds"] >= pause + drain + 10


@pytest.mark.parametrize("pod", [pod for pod in TALKING if pod.component == "worker"], ids=lambda pod: pod.owner)
def test_a_worker_is_given_the_time_that_it_is_drained_for(pod: Pod) -> None:
    assert pod.spec["terminationGracePeriodSeconds"] >= 2 * SchedulerConfig().drain_grace_s
