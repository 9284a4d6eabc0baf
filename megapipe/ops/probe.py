"""Selection of kernels: what is installed, what the run can use, and what agrees with torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError

K = TypeVar("K")

MARGIN = 4.0
"""Largest allowed ratio of a kernel's error to the error of torch's kernel."""


_PLANNED: ContextVar[bool] = ContextVar("planned", default=False)


@contextmanager
def planning() -> Iterator[None]:
    """Enter a context that chooses kernels for an absent GPU: nothing is queried or computed.

    The GPU is assumed to have compute capability 8.0 or more, and all kernels of torch and Triton
    to pass their checks. SDPA's backend follows from torch's rules. Kernels of other packages are
    planned as torch's, which save the same tensors.
    """
    token = _PLANNED.set(True)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_planned() -> bool:
    """Whether kernels are chosen for a GPU that is not present (:func:`planning`)."""
    return _PLANNED.get()


class Unavailable(Exception):
    """Error of a kernel that is not installed, cannot be used here, or disagrees with torch's."""


class Mismatch(Unavailable):
    """Error of an installed kernel that fails its self-check; the user is warned."""


@dataclass(frozen=True)
class Candidate(Generic[K]):
    """A kernel that a run may use, and its name in the configuration.

    `load` imports the kernel, or raises :class:`Unavailable` with the reason if it cannot be used.
    `check` compares it with torch's, and raises :class:`Mismatch` if they disagree; it is None for
    torch's usual kernels.
    """

    name: str
    load: Callable[[], K]
    check: Callable[[K], None] | None = None
    package: str | None = None
    """Distribution whose version is reported with the kernel."""


@dataclass(frozen=True)
class KernelChoice(Generic[K]):
    """The kernel that is used for one purpose, and why."""

    purpose: str
    name: str
    why: str
    kernel: K
    version: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"{self.name} {self.version}" if self.version else self.name
        return f"{self.purpose} {name}" + (f" ({self.why})" if self.why else "")


def choose_kernel(
    purpose: str,
    wanted: str,
    candidates: Sequence[Candidate[K]],
    without: Collection[str] = (),
) -> KernelChoice[K]:
    """Return the candidate named `wanted`; if `wanted` is auto, the first usable candidate that is
    not in `without`.

    Raises :class:`ConfigError` if a kernel that is asked for by name cannot be used; no other
    kernel replaces it.
    """
    if is_planned():
        candidates = [candidate for candidate in candidates if candidate.package is None]
        wanted = wanted if any(candidate.name == wanted for candidate in candidates) else "auto"
    if wanted in without:
        raise ConfigError(
            f"kernels.only.{purpose}={wanted} is excluded by "
            f"kernels.without={text_of([*without])}: expected kernels.only.{purpose}=auto, or "
            "kernels.without without it"
        )
    if wanted != "auto":
        (candidate,) = (c for c in candidates if c.name == wanted)
        try:
            kernel = _usable(candidate)
        except Unavailable as reason:
            raise ConfigError(f"kernels.only.{purpose}={wanted}: {reason}; expected auto") from None
        return KernelChoice(purpose, wanted, "as configured", kernel, _version(candidate.package))
    refused: dict[str, list[str]] = {}
    warnings: list[str] = []
    for candidate in candidates:
        try:
            if candidate.name in without:
                raise Unavailable("kernels.without")
            kernel = _usable(candidate)
        except Unavailable as reason:
            refused.setdefault(str(reason), []).append(candidate.name)
            if isinstance(reason, Mismatch):
                warnings.append(f"kernels.only.{purpose}: {candidate.name} is not used: {reason}")
            continue
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items())
        version = _version(candidate.package)
        return KernelChoice(purpose, candidate.name, why, kernel, version, tuple(warnings))
    raise AssertionError(f"{purpose}: not even torch's kernel can be used: {refused}")


def _usable(candidate: Candidate[K]) -> K:
    kernel = candidate.load()
    if candidate.check is not None and not is_planned():
        try:
            candidate.check(kernel)
        except Unavailable:
            raise
        except Exception as error:
            raise Mismatch(f"fails its self-check: {first_line(error)}") from error
    return kernel


def load_module(name: str, package: str) -> Any:
    """Import module `name`, which the distribution `package` installs.

    Callers name the extension module itself: on PyPI `apex` is an unrelated package. Raises
    :class:`Unavailable` with the reason if the module is missing or does not load.
    """
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not name.startswith(error.name) and error.name != name:
            raise Unavailable(f"{name} needs {error.name}, which is not installed") from None
        raise Unavailable(f"{package} is not installed (no module {name})") from None
    except Exception as error:  # an extension built for another torch fails in many ways
        raise Unavailable(f"{name} does not load: {first_line(error)}") from None


def _version(package: str | None) -> str:
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:  # built in place
        return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_preference(candidates: list[Candidate[K]], device: torch.device) -> list[Candidate[K]]:
    """Sort `candidates` by preference on `device`. They are given in the order for a GPU. On a CPU,
    inductor's kernel comes last and so is used only if named, since it compiles slowly."""
    return sorted(candidates, key=lambda each: device.type == "cpu" and each.name == "inductor")


def needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a GPU")


def needs_half(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"takes bf16 and fp16, not {str(dtype).removeprefix('torch.')}")


def needs_fp32(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise Unavailable("computes in fp32, and the model is fp64")


def needs_no_graph(compiled: bool) -> None:
    """Raise :class:`Unavailable` if blocks are `compiled`, for kernels that cannot be compiled."""
    if compiled:
        raise Unavailable("cannot be part of a compiled block (kernels.compile)")


def agree(
    kernel: K,
    reference: K,
    results: Callable[[K, torch.dtype], Sequence[Tensor]],
    dtype: torch.dtype,
) -> None:
    """Check that a kernel agrees with torch's. Raises :class:`Mismatch` if its error is more than
    :data:`MARGIN` times torch's error.

    `results(kernel, dtype)` returns outputs and gradients in a type, always on the same small data.
    `reference` is torch's kernel: in fp64 it gives the exact results, in `dtype` the usual error.
    """
    exact = results(reference, torch.float64)
    usual = results(reference, dtype)
    found = results(kernel, dtype)
    for i, (got, plain, right) in enumerate(zip(found, usual, exact, strict=True)):
        if got.shape != right.shape:
            raise Mismatch(f"result {i} has shape {list(got.shape)}, not {list(right.shape)}")
        error = (got.double() - right).abs().max().item()
        scale = torch.finfo(dtype).eps * right.abs().max().item()
        limit = MARGIN * ((plain.double() - right).abs().max().item() + scale)
        if not error <= limit:
            raise Mismatch(f"result {i} of its self-check is {error:.1e} off, at most {limit:.1e}")


def small_data(
    shapes: Sequence[tuple[int, ...]],
    rounded: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Return leaf tensors of type `dtype`, with random values that the type `rounded` can hold. The
    values are the same in each call."""
    generator = torch.Generator().manual_seed(20)
    drawn = [torch.randn(shape, generator=generator).to(rounded) for shape in shapes]
    return [x.to(device=device, dtype=dtype).requires_grad_() for x in drawn]
