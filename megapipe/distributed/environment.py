"""Environment variables that torch, CUDA and NCCL read once, when a device is first used."""

import ctypes
from collections.abc import Callable, MutableMapping
from pathlib import Path

from megapipe.errors import LaunchError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
LAUNCH_ORDER_DRIVER = 12030
"""First CUDA driver version, 12.3, that reports when a kernel has started."""


def cuda_driver() -> int:
    """Return the newest CUDA version that the driver supports (12030 is 12.3); 0 without driver."""
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
    """Set the unset variables among those that a run needs, and return their names.

    `sends_messages`: whether stages are on different GPUs. `driver` returns the newest CUDA version
    that the driver supports. Raises :class:`LaunchError` if a variable has a value with which
    pipeline messages would block each other.
    """
    before = set(environ)
    # work in a hardware queue waits for all work ahead of it, also for a receive that waits for its
    # message: every channel and group needs its own queue
    if environ.setdefault(CONNECTIONS, "32") == "1" and sends_messages:
        raise LaunchError(
            f"{CONNECTIONS}=1 puts all work of a GPU into one queue, so that pipeline "
            "messages block each other: expected 32, or the variable unset (Megatron-LM wants "
            "1 for tensor parallelism; megapipe does not)"
        )
    # loading a kernel on first use waits for all running work, a posted receive included
    environ.setdefault(LOADING, "EAGER")
    # memory grows in place; else another size may need frees first, which wait for all running work
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"
    # kernels of several communicators start in program order, the same on every GPU; with an older
    # driver each kernel would wait for the end of the previous one, a posted receive included
    if driver() >= LAUNCH_ORDER_DRIVER:
        environ.setdefault(ORDER, "1")
    chosen = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if (interfaces / chosen).is_dir() and chosen:  # one interface, not a list or a prefix
        environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
    environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler's start message
    if deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environ.setdefault("NCCL_ALGO", "Ring")
        environ.setdefault("NCCL_PROTO", "Simple")
    return [name for name in environ if name not in before]
