"""Nodes in network namespaces of their own, with a link between them that goes down."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.parity.jobs import ENDLESS, Job, arguments, tiny
from tests.parity.launch_with import launched_with
from tests.parity.sockets import EVERYWHERE, listening
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full
CLONE_NEWNET = 0x40000000
TIMEOUT_S = 6
LEAVE_S = 5.0
"""Seconds after ``parallel.timeout_s`` within which all have ended, launchers included."""
NAMES = [f"megapipe{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.213.7.1", "10.213.7.2"]
NAMED = """
import os
from megapipe.watch import rank
rank.machine = lambda: os.environ["TEST_NODE"]
callbacks = []
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Make two namespaces, each with a loopback and an end of the link; yield their names."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ends = ("type", "veth", "peer", "name", "wire", "netns", NAMES[1])
        ip("link", "add", "wire", "netns", NAMES[0], *ends)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
    else:
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def enter(host: str) -> None:
    """Move this process into the namespace."""
    handle = os.open(f"/var/run/netns/{host}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)


def network(pid: int) -> str:
    """Return the network namespace of a process."""
    return os.readlink(f"/proc/{pid}/ns/net")


def launch(
    job: Job, host: str, nodes: str, *given: str, meet_at: Sequence[str] = ADDRESSES
) -> subprocess.Popen[bytes]:
    """Start a launcher of one rank on a host."""
    named = job.folder / "named.py"
    named.write_text(NAMED)
    where = ",".join(f"{address}:29400" for address in meet_at)
    meet = ["--nproc", "1", "--nnodes", nodes, "--rdzv-id", "a", "--rdzv-last-call", "3"]
    command = launched_with(named, *meet, "--rdzv-endpoint", where, "train.py", *given)
    environ = {"GLOO_SOCKET_IFNAME": "wire", "TEST_NODE": host}
    return job.start(command, environ, preexec_fn=functools.partial(enter, host))


@pytest.mark.deadline
@in_parts("watchdog", ["true", "false"], full=["false"])
def test_a_link_that_goes_down(watchdog: str, hosts: list[str], tmp_path: Path) -> None:
    """Neither host can tell the other anything: both speak, and all end in time."""
    wanted = {"parallel.pp": "2", "parallel.timeout_s": str(TIMEOUT_S)}
    given = {**tiny(tmp_path), **ENDLESS, **wanted, "parallel.watchdog": watchdog}
    with Job(tmp_path) as job:
        for host in hosts:
            launch(job, host, "2", *arguments(given))
        job.await_text("| loss")
        ip("-n", hosts[0], "link", "set", "wire", "down")
        began = time.monotonic()
        outcome = job.end()
        assert time.monotonic() - began < TIMEOUT_S + LEAVE_S
    assert outcome.codes == [4, 4], outcome.text
    assert 1 <= len(outcome.errors) <= 2, outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.slow
def test_a_host_that_is_gone(hosts: list[str], tmp_path: Path) -> None:
    """The one where all meet; the other goes on by itself."""
    wanted = {"parallel.timeout_s": str(TIMEOUT_S), "checkpoint.every": "5", "train.steps": "400"}
    with Job(tmp_path, 120) as job:
        first, second = (
            launch(job, host, "1:2", *arguments({**tiny(tmp_path), **wanted})) for host in hosts
        )
        job.await_text("step   3")
        ip("-n", hosts[0], "link", "set", "wire", "down")
        for pid in [pid for pid in job.alive() if network(pid) == network(first.pid)]:
            os.kill(pid, signal.SIGKILL)
        assert second.wait(90) == 0, job.text
        outcome = job.end()
    assert re.findall(r"\| (pp 1 x dp \d)", outcome.text) == ["pp 1 x dp 2", "pp 1 x dp 1"]
    assert "restarting after step" in outcome.text


def test_a_host_whose_name_is_loopback_to_itself(hosts: list[str], tmp_path: Path) -> None:
    """Debian sets hosts up so; to the other one the name is the address of the interface that is
    named, and the store listens there alone. (127.257 is how a resolver may be asked for
    127.0.1.1.)"""
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.pp": "2"})
    with Job(tmp_path) as job:
        for host, name in zip(hosts, ("127.257", ADDRESSES[0]), strict=True):
            launch(job, host, "2", *given, meet_at=[name])
        job.await_text("| loss")
        open_at = set().union(*map(listening, job.alive()))
        for launcher in job.processes:
            launcher.send_signal(signal.SIGTERM)
        outcome = job.end()
    assert outcome.codes == [75, 75], outcome.text
    assert open_at
    assert not open_at & EVERYWHERE
    told = f"127.257 is loopback on this host: the rendezvous store listens at {ADDRESSES[0]}, by "
    assert outcome.text.count(told) == 1
    assert " listens on all interfaces" not in outcome.text
