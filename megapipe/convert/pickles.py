"""Pickled files of other trainers, read without running code in them.

A pickle is a program: it names functions of any installed package, and the unpickler calls them.
This module accepts a name only if it stands for plain data or for a torch function that makes a
tensor. Some other classes in the files (states of random generators, of Transformer Engine) are not
imported: a :class:`StandIn` replaces each object of such a class. Any other name is refused, unless
the user trusts the file.
"""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapipe.errors import CheckpointError
from megapipe.text import one_line

TRUST = "--trust-pickle"
TRUST_MEANS = "allow pickled files to run arbitrary code as this user (default: refuse them)"

_BESIDE_WEIGHTS = (
    *("megatron.", "transformer_engine.", "numpy.", "torch.distributed.checkpoint.planner."),
    *("io.BytesIO", "_io.BytesIO", "signal.Signals", "types.SimpleNamespace", "pathlib."),
    "builtins.getattr",  # how Python 3.11 pickles an enumeration member
)
"""Prefixes of the names of classes whose objects megapipe does not use."""


class StandIn:
    """A replacement for an object of a class that is not imported. It accepts and discards all data
    that a pickle passes to the object."""

    def __new__(cls, *args: object) -> StandIn:
        """Make an object; accepts any arguments."""
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        """Discard the arguments."""

    def __setstate__(self, state: object) -> None:
        """Discard the state."""


def is_beside_weights(name: str) -> bool:
    """Whether a :class:`StandIn` may replace objects of the class `name`, ``module.class``."""
    return name.startswith(_BESIDE_WEIGHTS)


def untrusted(path: Path, name: str) -> CheckpointError:
    """Return the error for a pickle that names `name`, which is neither plain data nor a tensor."""
    return CheckpointError(
        f"{path} is pickled and would run {name}: pass {TRUST} if you trust its author"
    )


def load(path: Path, *, trust: bool) -> Any:
    """Return the content of a file that ``torch.save`` wrote; tensors are memory-mapped, not read.

    With `trust` the file may run any code, as with ``pickle.load``.

    Raises:
        CheckpointError: the file is missing or damaged, or runs code and is not trusted.
    """
    try:
        with path.open("rb") as file:
            mapped = zipfile.is_zipfile(file)  # False for files from before torch 1.6
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        if trust:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
        with torch.serialization.safe_globals(_allowed(path) if mapped else [Namespace]):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError:  # torch's message is a page of advice
        raise CheckpointError(
            f"{path} is damaged, or it needs {TRUST}, which runs code from the file"
        ) from None
    except Exception as error:  # whatever a damaged file, or code of a trusted one, raises
        raise CheckpointError(
            f"{path} is not a complete torch.save file: {one_line(error)}"
        ) from None


def _allowed(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the names in a pickle that ``torch.load`` has to accept besides torch's own. Raises
    CheckpointError for a name that could run code."""
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [Namespace]
    for name in sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
        if is_beside_weights(name):
            allowed.append((StandIn, name))
        elif name != "argparse.Namespace":
            raise untrusted(path, name)
    return allowed
