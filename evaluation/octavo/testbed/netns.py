"""Makes a network of hosts on this machine, whose links can be cut: network namespaces around one switch.

All of it lives in a namespace of the process that makes it, and is gone when the last process in it is.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_SWITCH: Final = "switch"
_BRIDGE: Final = "bridge0"
_ADDRESS: Final = "10.77.0.{}"
# Frames for it reach no host.
_NOBODY: Final = "02:00:00:00:00:99"
_OWN: Final = ("unshare", "--user", "--map-root-user", "--net", "--mount")
# In it named namespaces can be made, by whoever made the one around it, and the names of others are out of reach.
_NAMES: Final = "mount -t tmpfs tmpfs /run"


def unavailable() -> str:
    """Says why this machine lets nobody make networks; the answer is empty if it does."""
    for tool in ("unshare", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    trial = f"{_NAMES} && ip netns add a && ip -n a link add eth0 type veth peer name b && ip netns exec a true"
    found = subprocess.run([*_OWN, "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"network namespaces cannot be made here: {found.stderr.strip()}" if found.returncode else ""


def in_own_network(*arguments: str) -> list[str]:
    """Returns the command that runs this Python with `arguments` where a `Network` can be made."""
    return [*_OWN, "sh", "-c", f'{_NAMES} && exec "$@"', "sh", sys.executable, *arguments]


@dataclass
class Network:
    """Hosts by name, of which this process is `here`. Only for processes started by `in_own_network`."""

    here: str
    others: Sequence[str]
    _cut: set[tuple[str, str]] = field(default_factory=set)
    _unplugged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", _BRIDGE, "up")
        for name in self.others:
            _ip("netns", "add", name)
        for name in (self.here, *self.others):
            self._plug_in(name)

    def address(self, name: str) -> str:
        """Returns the IPv4 address of a host."""
        return _ADDRESS.format([self.here, *self.others].index(name) + 1)

    def on(self, name: str) -> list[str]:
        """Returns the beginning of a command that is to run on this host."""
        return [] if name == self.here else ["ip", "netns", "exec", name]

    def cut(self, sender: str, receiver: str) -> None:
        """Loses, from now on, what `sender` sends to `receiver` without a word; what comes back is not lost."""
        self._cut.add((sender, receiver))
        self._neighbour(sender, "replace", receiver, "lladdr", _NOBODY, "nud", "permanent")

    def unplug(self, name: str) -> None:
        """Pulls the cable of a host."""
        self._unplugged.add(name)
        _ip("-n", _SWITCH, "link", "set", name, "down")

    def heal(self) -> None:
        """Lets everybody reach everybody again."""
        for sender, receiver in self._cut:
            self._neighbour(sender, "del", receiver)
        for name in self._unplugged:
            _ip("-n", _SWITCH, "link", "set", name, "up")
        self._cut.clear()
        self._unplugged.clear()

    def _plug_in(self, name: str) -> None:
        inside = self._inside(name)
        _ip(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", _SWITCH)
        _ip("-n", _SWITCH, "link", "set", name, "master", _BRIDGE, "up")
        _ip(*inside, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip(*inside, "link", "set", device, "up")

    def _neighbour(self, name: str, change: str, neighbour: str, *how: str) -> None:
        _ip(*self._inside(name), "neighbour", change, self.address(neighbour), *how, "dev", "eth0")

    def _inside(self, name: str) -> list[str]:
        return [] if name == self.here else ["-n", name]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, env={**os.environ, "LC_ALL": "C"})
