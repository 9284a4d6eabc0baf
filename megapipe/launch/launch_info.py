"""Reads a process's rank and peers from the environment variables of its launcher.

A job starts under :mod:`megapipe.launch` or torchrun, under srun or mpirun (their own variables are
enough), or as one plain process. A process is refused if a launcher has started it, but the number
of processes is unknown. Otherwise each process would train the whole model alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.errors import LaunchError
from megapipe.launch.endpoints import is_host

OPTIONS = "MEGAPIPE_LAUNCH_OPTIONS"
"""Environment variable in which megapipe's launcher passes its own options to its ranks."""
NODES = "PET_NNODES"
"""Environment variable that tells torchrun the number of nodes; Kubeflow sets it in each pod."""
ONE = "1", "1:1"
"""Values of :data:`NODES` that mean one node."""
_JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable with a pod's index in a Kubernetes job. No variable has their number."""
RUN_ALONE = "to run one process alone, set RANK=0 WORLD_SIZE=1"


@dataclass(frozen=True)
class LaunchInfo:
    """A process's rank in the job and on its host, and the address of the rendezvous store."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    launched: bool = False
    """Whether torchrun, srun or mpirun has started this process."""
    hosted: bool = False
    """Whether the launcher already runs the store at address:port (torchrun does)."""
    options: tuple[str, ...] | None = None
    """Options of megapipe's own launcher; None if another launcher started this process."""
    guessed: tuple[str, ...] = ()
    """Names of the fields whose values are guesses, until the ranks have compared their hosts
    (:func:`megapipe.launch.rendezvous.place_on_host`)."""
    joined: bool = False
    """Whether the job uses a default process group that its caller has made. The group is not
    destroyed when the job ends."""
    is_listed: bool = False
    """Whether the address is the first host of SLURM's list."""
    kubernetes: str = ""
    """Address of the Kubernetes API service, if MASTER_ADDR is localhost in a pod; otherwise "".
    Other pods may then reach this pod through a service."""

    @property
    def hosts(self) -> bool:
        """Whether this process hosts the store."""
        return self.rank == 0 and self.world > 1 and not self.hosted

    @property
    def ended_by_launcher(self) -> bool:
        """Whether the launcher ends all processes if one fails; torchrun does on a single node."""
        return self.hosted and self.local_world == self.world


class _Names(NamedTuple):
    """Names of a launcher's variables for rank, world size, local rank and local world size."""

    rank: str
    world: str
    local_rank: str
    local_world: str


_TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Variables that mpirun of MPICH and Intel MPI sets."""
_SLURM = _Names(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
)
_HOSTS = {
    _SLURM: ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    _OPEN_MPI: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    _HYDRA: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
}
"""Names of SLURM's variables with the list of the processes' hosts, by launcher. Without other
settings, rank 0 is on the first host of the list. Under mpirun the list of the SLURM step is not
used: mpirun starts its processes in a step that can lack the first host."""
_LOCAL = "127.0.0.1", "localhost"
"""Addresses of rank 0 that mean that all processes are on one host."""
_OTHERS = (
    "PMIX_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "MV2_COMM_WORLD_RANK",
)
"""Rank variables of launchers that are not supported: PMIx, Cray, Flux, LSF, MVAPICH2."""


def spare_threads(local_world: int) -> None:
    """Set OMP_NUM_THREADS=1 if several processes share the node, as torchrun does, unless it is set
    already. Call this before torch is imported, which reads the variable."""
    if local_world > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def find_launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """Read the launcher's environment variables. Raises :class:`LaunchError` for wrong values."""
    names = _launcher(environ)
    if names is None:
        _check_alone(environ)
        return LaunchInfo()
    address = environ.get("MASTER_ADDR") or "127.0.0.1"
    given: Mapping[str, str] = environ
    guessed: tuple[str, ...] = ()
    kubernetes = ""
    if names is _TORCHRUN:
        if address == "localhost" and "LOCAL_RANK" not in environ:
            kubernetes = environ.get("KUBERNETES_SERVICE_HOST", "")
        is_here = address in _LOCAL and not kubernetes
        local = [environ.get(name, "") for name in names[:2]] if is_here else ["0", "1"]
        given = {**dict(zip(names[2:], local, strict=True)), **environ}
        fields = zip(names[2:], ("local_rank", "local_world"), strict=True)
        guessed = tuple(field for name, field in fields if name not in environ)
    rank, world, local_rank, local_world = (_number(given, name) for name in names)
    if not rank < world:
        raise LaunchError(f"rank {rank} does not exist in a world of {world}")
    hosts = _hosts(environ, names, is_one=local_world == world)
    if hosts:
        address = first_host(hosts)
    elif names in (_OPEN_MPI, _HYDRA) and local_world < world and not environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"{local_world} of {world} processes are on this host, and no variable of mpirun "
            "names the host of rank 0: set MASTER_ADDR to it"
        )
    _check_address(address)
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and names is _TORCHRUN
    options = environ.get(OPTIONS) if hosted else None
    return LaunchInfo(
        rank,
        world,
        local_rank,
        local_world,
        address,
        _port(environ),
        launched=True,
        hosted=hosted,
        options=None if options is None else tuple(shlex.split(options)),
        guessed=guessed,
        is_listed=bool(hosts) and names is not _SLURM,
        kubernetes=kubernetes,
    )


def guess_launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """Guess this process's rank and peers after :func:`find_launch_info` has failed, to decide
    which process prints the error. The port is 0 if the processes cannot meet."""
    known = (_TORCHRUN, _OPEN_MPI, _HYDRA, _SLURM)
    names = next((each for each in known if each.rank in environ), _TORCHRUN)

    def whole(name: str) -> int | None:
        text = environ.get(name, "")
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None

    rank = next((n for n in map(whole, (names.rank, *_OTHERS)) if n is not None), None)
    if rank is None:
        return LaunchInfo(port=0)
    world = max(whole(names.world) or 0, rank + 1, 2)
    hosts = _hosts(environ, names, is_one=whole(names.local_world) == world)
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    local_rank = whole(names.local_rank)
    if local_rank is None:
        local_rank = rank if address in _LOCAL else 0
    port = 0
    with contextlib.suppress(LaunchError):
        _check_address(address)
        if "MASTER_PORT" in environ or "SLURM_JOB_ID" in environ:
            port = _port(environ)
    return LaunchInfo(rank, world, local_rank, address=address, port=port, launched=True)


def _hosts(environ: Mapping[str, str], names: _Names, *, is_one: bool) -> str:
    """Return SLURM's list of the processes' hosts, which begins with the host of rank 0. Return ""
    if MASTER_ADDR is set, or if mpirun started all processes on one host."""
    if environ.get("MASTER_ADDR") or (is_one and names is not _SLURM):
        return ""
    lists = (environ.get(name) for name in _HOSTS.get(names, ()))
    return next(filter(None, lists), "")


def _check_address(address: str) -> None:
    """Raise :class:`LaunchError` if `address` cannot be a host."""
    if not is_host(address):
        raise LaunchError(
            f"environment variable MASTER_ADDR={address!r}: expected the name or address of a host"
        )


def _launcher(environ: Mapping[str, str]) -> _Names | None:
    """Return the names of the variables that describe this process; None if no launcher has set
    any.

    Under SLURM, mpirun starts its own daemons with srun. SLURM's variables then count nodes, so
    those of mpirun come first.
    """
    in_step = _SLURM.rank in environ and _SLURM.world in environ
    if _TORCHRUN.rank in environ or _TORCHRUN.world in environ:
        return _TORCHRUN
    if _OPEN_MPI.rank in environ or _OPEN_MPI.world in environ:
        return _OPEN_MPI
    if _HYDRA.rank in environ or _HYDRA.world in environ:
        ours = [environ.get(name) for name in _HYDRA[:2]]
        same = in_step and ours == [environ[name] for name in _SLURM[:2]]
        return _SLURM if same else _HYDRA  # srun --mpi=pmi2 sets both
    return _SLURM if in_step else None


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise :class:`LaunchError` if this process seems to be one of several."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    half = _SLURM.rank in environ or _SLURM.world in environ
    if half and (tasks != "1" or environ.get(_SLURM.rank, "0") != "0"):
        missing = _SLURM.world if _SLURM.rank in environ else _SLURM.rank
        raise LaunchError(
            f"this is one of {tasks} SLURM tasks, and {missing} is not set: start it with "
            f"srun or python -m megapipe.launch; {RUN_ALONE}"
        )
    several = {NODES: (environ.get(NODES) or "1") not in ONE, _JOB_INDEX: _JOB_INDEX in environ}
    for name, is_so in several.items():
        if is_so:
            raise LaunchError(
                f"{name}={environ[name]} means several pods, and RANK and WORLD_SIZE are not "
                "set: in each pod start it with torchrun or python -m megapipe.launch "
                "--nnodes N, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; "
                f"{RUN_ALONE}"
            )
    for name in _OTHERS:
        if name in environ:
            raise LaunchError(
                f"{name}={environ[name]} comes from a launcher that megapipe does not know: "
                "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT from that launcher's variables; {RUN_ALONE}"
            )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    number = re.match(r"\d+", text)  # SLURM writes tasks per node as 8(x4)
    if number is None:
        raise LaunchError(f"environment variable {name}={text!r}: expected a number")
    return int(number.group())


def _port(environ: Mapping[str, str]) -> int:
    port = environ.get("MASTER_PORT")
    if not port:
        job = environ.get("SLURM_JOB_ID", "9500")
        if not job.isdigit():
            raise LaunchError(f"environment variable SLURM_JOB_ID={job!r}: expected a number")
        port = str(20000 + int(job) % 10000)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"environment variable MASTER_PORT={port!r}: expected a port number")
    return int(port)


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)  # up to a comma outside of brackets
    if match is None:
        return "127.0.0.1"
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", match.group())
