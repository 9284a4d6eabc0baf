"""Environment variables that torch, CUDA and NCCL read once, when a device is first used."""

import ctypes
from collections.abc import Callable, MutableMapping
from pathlib import Path

from megapipe.errors import LaunchError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
TELLS_STARTS = 12030
"""The first version of CUDA, 12.3, whose driver can tell when a kernel has started."""


def cuda_driver() -> int:
    """The newest CUDA that this machine's driver supports, 12030 for 12.3; 0: there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def set_environment(
    environ: MutableMapping[str, str],
    *,
    sends_messages: bool,
    deterministic: bool,
    interfaces: Path = Path("/sys/class/net"),
    driver: Callable[[], int] = cuda_driver,
) -> list[str]:
    """Fill in what a run needs; what is set stays. Returns the names of what is new.

    `sends_messages`: stages are on GPUs of their own. `driver` tells the newest CUDA that the
    machine supports. Raises :class:`LaunchError` where what is set cannot be right.
    """
    before = set(environ)
    # work in a hardware queue waits for what is ahead of it, a receive that waits for its message
    # included: every channel and group needs a queue of its own
    if environ.setdefault(CONNECTIONS, "32") == "1" and sends_messages:
        raise LaunchError(
            f"{CONNECTIONS}=1 makes the messages between pipeline ranks wait for each other, as "
            "all work of a GPU is then in one queue: expected 32, or the variable unset (with "
            "tensor parallelism other frameworks ask for 1; nothing here needs it)"
        )
    # a kernel loaded on first use waits for all that runs, a posted receive included
    environ.setdefault(LOADING, "EAGER")
    # memory grows in place; without, making room for another size may free, and so wait for, all
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"
    # kernels of several communicators start in the order of the program, the same on every GPU; an
    # older driver would have each wait for the end of the one before, a posted receive included
    if driver() >= TELLS_STARTS:
        environ.setdefault(ORDER, "1")
    chosen = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if (interfaces / chosen).is_dir() and chosen:  # one interface, not a list or a prefix
        environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
    environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler tells when it starts
    if deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environ.setdefault("NCCL_ALGO", "Ring")
        environ.setdefault("NCCL_PROTO", "Simple")
    return [name for name in environ if name not in before]
