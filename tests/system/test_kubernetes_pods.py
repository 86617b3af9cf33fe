"""The pods of deploy/kubernetes as their kubelets treat them: real processes with a manifest's command and variables,
asked by its probes, told to end as it says, and the commands that docs/kubernetes.md runs in them."""

import itertools
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

import grpc
import httpx
import pytest
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.manifests import PROBES, ROOT, Pod, arguments, of_kind, own_settings, pods, render, shared_settings

from octavo.frontend.stream.metrics import LOAD_METRICS
from octavo.testbed.stack import Stack, collect, free_address, token_request
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

pytestmark = pytest.mark.system

_OBJECTS: Final = render("overlays/cpu-bundled", "gateway", "kv-events")
(_POOL,) = of_kind(_OBJECTS, "InferencePool")
_PODS: Final = {pod.component: pod for pod in pods(_OBJECTS)}
_ADDRESS: Final = re.compile(r"(?<![\w.])(0\.0\.0\.0|127\.0\.0\.1|\*|octavo-(\w+)):(\d+)")
_OWN_MOUNTS: Final = ("unshare", "--user", "--map-root-user", "--mount")
_PROMPT: Final = list(range(20))
# What docs/kubernetes.md runs in pods.
_PAGE: Final = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8").replace("\\\n", "")
_COMMANDS: Final = re.findall(
    r"^kubectl --namespace octavo exec \S*octavo-([a-z]+)\S* -- +octavo (.+)$", _PAGE, re.MULTILINE
)


@dataclass
class Node(Stack):
    """Runs pods on this machine, each pod's ports at free ones."""

    ports: dict[tuple[str, int], str] = field(default_factory=dict)
    # Where the scheduler's pod is now, if others are to find it by its name.
    scheduler_host: str = ""
    # Slow enough for pods to end in the middle of a stream.
    step_ms: str = "20"

    def on(self, name: str) -> Sequence[str]:
        """Gives processes a file of hosts of their own that knows the scheduler's name, if it has one."""
        if not self.scheduler_host:
            return ()
        return [*_OWN_MOUNTS, "sh", "-c", f'mount --bind {self._hosts} /etc/hosts && exec "$@"', "sh"]

    @property
    def _hosts(self) -> Path:
        return self.directory / "hosts"

    def move_scheduler(self, host: str) -> None:
        self.scheduler_host = host
        self._hosts.write_text(f"127.0.0.1 localhost\n{host} octavo-scheduler\n", encoding="utf-8")

    @property
    def address(self) -> str:
        return self.here("0.0.0.0:50051", "frontend")

    @property
    def admin_address(self) -> str:
        return self.here("0.0.0.0:50052", "scheduler")

    def here(self, text: str, component: str) -> str:
        """Returns what a pod is told with the addresses that are meant by it on this machine."""

        def address(found: re.Match[str]) -> str:
            place = found[2] or component, int(found[3])
            if place not in self.ports:
                self.ports[place] = free_address()
            if place[0] == "scheduler" and self.scheduler_host:
                host = "octavo-scheduler" if found[2] else self.scheduler_host
                return f"{host}:{self.ports[place].rpartition(':')[2]}"
            return self.ports[place]

        return _ADDRESS.sub(address, text)

    def start_pod(self, component: str, name: str = "") -> None:
        """Starts a pod's container as its manifest says, but with the fake device; under a `name`, a second one."""
        command, *given = arguments(_PODS[component].container)
        self.start(
            command,
            name or component,
            arguments=[self.here(argument, component) for argument in given],
            **self.variables(component, name or component),
        )

    def variables(self, component: str, name: str) -> dict[str, str]:
        container = _PODS[component].container
        given = shared_settings(container, _OBJECTS) | own_settings(container)
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert given["OCTAVO_CURVE_KEYS"] in mounted
        here = {"OCTAVO_MODEL": str(self.model), "OCTAVO_CURVE_KEYS": str(self.secret(component))}
        if component == "worker":
            assert given["OCTAVO_WORKER_ID"] == str({"fieldRef": {"fieldPath": "metadata.name"}})
            here |= {"OCTAVO_DEVICE": "fake", "OCTAVO_WORKER_ID": name}
            # The fake device has no memory that could have a size.
            del given["OCTAVO_KV_CACHE_MEMORY"], given["OCTAVO_SWAP_MEMORY"]
        values = {key: self.here(value, component) for key, value in given.items()} | here
        # Pods that start slowly, as on a busy machine, are waited for.
        return values | {
            "OCTAVO_FAKE_STEP_MS": self.step_ms,
            "OCTAVO_SCHEDULER_GRACE": "300",
            "OCTAVO_WORKER_GRACE": "300",
        }

    def secret(self, component: str) -> Path:
        """Mounts the pod's keys as a kubelet does: every file a link into a folder that a link names."""
        folder = self.directory / f"keys-{component}"
        if not folder.exists():
            (secret,) = (each["secret"] for each in _PODS[component].spec["volumes"] if each["name"] == "keys")
            (folder / "..2026").mkdir(parents=True)
            (folder / "..data").symlink_to("..2026")
            for item in secret["items"]:
                (folder / "..2026" / item["path"]).write_bytes((self.directory / "keys" / item["key"]).read_bytes())
                (folder / "..2026" / item["path"]).chmod(secret["defaultMode"])
                (folder / item["path"]).symlink_to(f"..data/{item['path']}")
        return folder

    def probe(self, component: str, probe: str) -> bool:
        """Asks as a kubelet asks: whatever is not SERVING, an error or a missing answer included, is a failure."""
        asked = _PODS[component].container[probe]["grpc"]
        with grpc.insecure_channel(self.here(f"0.0.0.0:{asked['port']}", component)) as channel:
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def probes(self, component: str) -> list[bool]:
        """Returns the answers to startup, readiness and liveness."""
        return [self.probe(component, probe) for probe in PROBES]

    def end_pod(self, name: str, pod: Pod) -> int:
        """Ends a container as a kubelet does once its pause is over; fails where that would kill it. Returns its exit
        status."""
        pause = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        began = monotonic()
        self.processes[name].send_signal(signal.SIGTERM)
        status = self.processes[name].wait(120)
        assert monotonic() - began < pod.spec["terminationGracePeriodSeconds"] - pause
        return status


@pytest.fixture
def node(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with ExitStack() as cleanup:
        node = cleanup.enter_context(Node(byte_model, tmp_path_factory.mktemp("node")))
        # As docs/kubernetes.md says.
        assert re.search(r"^octavo keys keys ", _PAGE, re.MULTILINE)
        keys = node.start("keys", arguments=[str(node.directory / "keys")])
        assert keys.wait(60) == 0, node.log("keys")
        del node.processes["keys"]
        yield node
        # pytest shows it of a test that fails.
        for log in sorted(node.directory.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")


def test_probes_tell_how_far_a_pod_has_come_and_the_pages_commands_work_in_them(node: Node) -> None:
    node.step_ms = "0"
    node.start_pod("frontend")
    node.wait_for(lambda: node.probe("frontend", "startupProbe"))
    assert node.probes("frontend") == [True, False, True]
    node.start_pod("scheduler")
    node.wait_for(lambda: node.probes("scheduler") == [True, True, True])
    assert not node.probe("frontend", "readinessProbe")
    node.start_pod("worker")
    node.wait_for(lambda: node.probes("worker") == [True, True, True])
    node.wait_for(lambda: node.probes("frontend") == [True, True, True])
    assert len(_COMMANDS) >= 5
    # Commands find the frontend of their own pod where one listens by default.
    default = node.here("127.0.0.1:50051", "frontend")
    for component, line in _COMMANDS:
        meant = {"POD": "worker", "NAME": "some", "...": "You are helpful."}
        command, *rest = [meant.get(word, node.here(word, component)) for word in shlex.split(line)]
        if command == "top":
            rest.append("--once")
        variables = {"OCTAVO_SERVER": default} | node.variables(component, component)
        done = node.start(command, "command", arguments=rest, **variables)
        assert done.wait(60) == 0, f"{line}: {node.log('command')}"
        del node.processes["command"]
    # One of them drained the worker, which ended well.
    assert node.processes["worker"].wait(60) == 0
    node.wait_for(lambda: not node.probe("frontend", "readinessProbe"))


def test_a_frontend_that_is_ended_refuses_what_is_new_and_finishes_its_streams(node: Node) -> None:
    for component in ("scheduler", "worker", "frontend"):
        node.start_pod(component)
    node.wait_for(lambda: node.probe("frontend", "readinessProbe"))
    # The longest keeps the frontend from ending before it was asked.
    stream, longest = (node.stream(token_request(_PROMPT, count)) for count in (100, 1500))
    first, _ = next(stream), next(longest)
    node.processes["frontend"].send_signal(signal.SIGTERM)
    node.wait_for(lambda: not node.probe("frontend", "readinessProbe"))
    assert node.probe("frontend", "livenessProbe"), "it would be killed for draining"
    with pytest.raises(grpc.RpcError, match=r"DRAINING|UNAVAILABLE"):
        list(node.stream(token_request(_PROMPT, 1), timeout=60))
    longest.cancel()
    assert collect([first, *stream]).token_ids == tokens(node, 100)
    assert node.processes["frontend"].wait(60) == 0


def test_streams_outlive_the_end_of_a_worker_and_of_the_scheduler(node: Node) -> None:
    for component in ("scheduler", "frontend"):
        node.start_pod(component)
    names = ("worker-a", "worker-b")
    node.start_pod("worker", names[0])
    node.wait_for(lambda: node.probe("frontend", "readinessProbe"))
    stream = node.stream(token_request(_PROMPT, 400))
    first = next(stream)
    # A second pod has addresses of its own.
    node.ports = {place: address for place, address in node.ports.items() if place[0] != "worker"} | {
        place: address for place, address in node.ports.items() if place == ("scheduler", 5572)
    }
    node.start_pod("worker", names[1])
    node.wait_for(lambda: len(node.load().workers) == len(names))
    assert node.end_pod(names[0], _PODS["worker"]) == 0
    assert [worker.id for worker in node.load().workers] == [names[1]]
    assert node.end_pod("scheduler", _PODS["scheduler"]) == 0
    assert node.probe("worker", "livenessProbe"), "a worker that waits for a scheduler would be killed"
    assert node.probe("frontend", "livenessProbe")
    node.start_pod("scheduler")
    node.wait_for(lambda: node.probe("scheduler", "readinessProbe"))
    assert collect([first, *stream]).token_ids == tokens(node, 400)


def test_a_router_hears_what_the_scheduler_holds_and_a_picker_how_much(node: Node) -> None:
    for component in ("scheduler", "worker", "frontend"):
        node.start_pod(component)
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        topic = node.variables("scheduler", "scheduler")["OCTAVO_KV_EVENTS_TOPIC"]
        router.subscribe(topic)
        router.connect(f"tcp://{node.here('*:5557', 'scheduler')}")
        node.wait_for(lambda: node.probe("frontend", "readinessProbe"))
        numbers = itertools.count()

        def heard() -> bool:
            # Blocks that are new each time, for the first may be told before the router has joined.
            node.generate(token_request([next(numbers) % 250] * 40, 2))
            return bool(router.poll(200))

        node.wait_for(heard)
        told, _, _ = router.recv_multipart()
    assert told.decode() == topic
    port = _POOL["spec"]["targetPorts"][0]["number"]
    text = httpx.get(f"http://{node.here(f'0.0.0.0:{port}', 'frontend')}/metrics", timeout=60, trust_env=False).text
    assert set(re.findall(r"^(vllm:\w+)(?=\{)", text, re.MULTILINE)) >= LOAD_METRICS


def own_mounts() -> bool:
    """Whether this machine gives processes mounts of their own."""
    if not shutil.which(_OWN_MOUNTS[0]):
        return False
    return subprocess.run([*_OWN_MOUNTS, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not own_mounts(), reason="this machine gives processes no mounts of their own")
def test_a_scheduler_whose_pod_comes_back_at_another_address_is_found_by_its_name(node: Node) -> None:
    node.move_scheduler("127.0.0.2")
    for component in ("scheduler", "worker", "frontend"):
        node.start_pod(component)
    node.wait_for(lambda: node.probe("frontend", "readinessProbe"))
    stream = node.stream(token_request(_PROMPT, 100))
    first = next(stream)
    assert node.end_pod("scheduler", _PODS["scheduler"]) == 0
    node.move_scheduler("127.0.0.3")
    node.start_pod("scheduler")
    assert collect([first, *stream]).token_ids == tokens(node, 100)


def tokens(node: Node, count: int) -> list[int]:
    """What the fake model says after `_PROMPT` if nothing disturbs it."""
    return expected_tokens(_PROMPT, SamplingParams(max_tokens=count), 0, count, FakeVocabulary.read(node.model))
