"""The SLURM of these tests: where it is refused, and that nothing is left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.hosts import BRIDGE, namespace
from tests.parity.jobs import ROOT

pytestmark = pytest.mark.full
COVERED = ("/etc/hosts", "/etc/resolv.conf", "/etc/slurm", "/run")
"""What hosts of a cluster see other files in the place of."""
BRING_UP = """
import sys, time
from pathlib import Path
from tests.cluster.slurm import Cluster
cluster = Cluster(Path(sys.argv[1]))
cluster.begin()
print(*(host.init for host in (cluster.control, *cluster.nodes.values())), flush=True)
time.sleep(600)
"""


def machine() -> list[object]:
    """Return what a cluster could change on the machine; no other test changes it meanwhile."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    links = os.listdir("/sys/class/net")
    return [
        *(sorted(os.listdir(path)) for path in ("/etc", "/etc/slurm")),
        *(Path(path).read_bytes() for path in ("/etc/hosts", "/etc/resolv.conf")),
        [line for line in mounts if line.split()[4] in COVERED],
        [name for name in links if name.startswith((BRIDGE, "to"))],
    ]


def processes(namespaces: set[str]) -> Iterator[int]:
    """Yield all processes in these PID namespaces."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if namespace(int(path.name)) in namespaces:
                yield int(path.name)


def test_nothing_is_left_of_a_test_that_is_killed(tmp_path: Path) -> None:
    if (reason := slurm.why_not()) is not None:
        pytest.skip(reason)
    before = machine()
    command = [sys.executable, "-c", BRING_UP, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        inits = list(map(int, process.stdout.readline().split()))
        hosts = set(map(namespace, inits))
        daemons = set(processes(hosts)) - set(inits)
        reason = slurm.why_not()
        process.kill()
    assert len(hosts) == 1 + len(slurm.NODES)
    assert daemons
    assert reason is None, "those of a test are no SLURM of the machine"
    slurm.await_that(lambda: not list(processes(hosts)), lambda: f"{list(processes(hosts))}")
    assert machine() == before


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = slurm.why_not()
    assert reason is not None
    assert reason.startswith("a cluster needs slurm-wlm, munge and iproute2: there is no slurmctld")


def test_a_user_who_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert slurm.why_not() == "a cluster needs root"


def test_a_machine_with_a_slurm_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is configured, or runs."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm, "PROGRAMS", ())
    daemon = tmp_path / "slurmd"
    shutil.copy("/bin/sleep", daemon)
    with subprocess.Popen([daemon, "600"]) as process:
        try:  # it has its name a moment after it begins
            slurm.await_that(slurm.why_not, lambda: "nobody notices")
            reason = slurm.why_not()
        finally:
            process.kill()
    assert reason == "this machine has a SLURM of its own: slurmd runs"
    monkeypatch.setattr(slurm, "CONFIGURATION", daemon)
    assert slurm.why_not() == f"this machine has a SLURM of its own: {daemon}"
