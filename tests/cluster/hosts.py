"""Hosts on one machine: each has its own namespaces, and leaves nothing behind when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

OWN = ("--mount", "--uts", "--ipc", "--net", "--pid")
"""The namespaces that a host has of its own."""
SETTING_UP = "hostname {}; mount -t tmpfs shm /dev/shm; ip link set lo up; echo ready"
BRIDGE = "bridge0"


class Host:
    """An init, and all that is run on this host.

    All processes of a host end when its init ends, and so do hosts `within` it. The outermost host
    ends with this process, however that ends: then its links and mounts are gone too. Raises
    OSError where the system makes no namespaces.
    """

    def __init__(self, name: str, within: Host | None = None) -> None:
        self.name = name
        self.within = within
        outside = ["setpriv", "--pdeathsig", "KILL"] if within is None else within.entered()
        init = ["bash", "-ec", f"{SETTING_UP.format(name)}; sleep infinity & wait"]
        self._process = subprocess.Popen(
            [*outside, "unshare", *OWN, "--kill-child", "--mount-proc", *init],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if answer != "ready":
            self._process.communicate()
            raise OSError(f"no namespaces for {name}: {answer}")
        self.init = next(pid for pid in _line(self._process.pid) if _is_init(pid))

    def entered(self) -> list[str]:
        """Return the words to put before a command that is to run on this host."""
        return ["nsenter", "--target", str(self.init), *OWN]

    def run(
        self, *words: str, folder: Path = Path("/"), environ: Mapping[str, str] | None = None
    ) -> str:
        """Run a command on this host; returns what it has written, and raises AssertionError with
        it if the command fails."""
        done = subprocess.run(
            [*self.entered(), "env", "--chdir", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(words)}: {done.stdout}"
        return done.stdout

    @property
    def cable(self) -> str:
        """Name of the host's link on the host that has the bridge."""
        return f"to{self.init}"

    def cover(self, path: str, own: Path) -> None:
        """Mount a file or folder in the place of another for this host and those within it."""
        self.run("mount", "--bind", str(own), path)

    def make_network(self, address: str) -> None:
        """Make a bridge, on which this host has an address; networks are /24."""
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("address", "add", f"{address}/24", "dev", BRIDGE)
        self._ip("link", "set", BRIDGE, "up")

    def plug_in(self, host: Host, address: str) -> None:
        """Connect a host within this one with its bridge."""
        other = ("peer", "name", "eth0", "netns", str(host.init))
        self._ip("link", "add", host.cable, "type", "veth", *other)
        self._ip("link", "set", host.cable, "master", BRIDGE, "up")
        host._ip("address", "add", f"{address}/24", "dev", "eth0")
        host._ip("link", "set", "eth0", "up")

    def _ip(self, *words: str) -> None:
        """Change the network; processes have the numbers here that they have outside."""
        enter = ("nsenter", "--target", str(self.init), "--net")
        subprocess.run([*enter, "ip", *words], check=True)

    def pids(self, name: str) -> Iterator[int]:
        """Yield the processes of this host that have this name."""
        for path in Path("/proc").glob("[0-9]*/comm"):
            pid = int(path.parent.name)
            with contextlib.suppress(OSError):
                if path.read_text().strip() == name and namespace(pid) == namespace(self.init):
                    yield pid

    def end(self) -> None:
        """Kill all processes at once, as a power cut does.

        Its network would be there for a while after that, and answer at the address of the next
        host of this name.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._process.communicate()
        if self.within:
            with contextlib.suppress(subprocess.CalledProcessError):  # it is gone already
                self.within._ip("link", "delete", self.cable)


def namespace(pid: int) -> str:
    """Return the PID namespace of a process."""
    return os.readlink(f"/proc/{pid}/ns/pid")


def _line(pid: int) -> Iterator[int]:
    """Yield a process, its child, that one's child, and so on."""
    while True:
        yield pid
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _is_init(pid: int) -> bool:
    """Whether a process is the first one of its namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return status.partition("NSpid:")[2].splitlines()[0].split()[-1] == "1"
