"""Pickled files of other trainers, read without running what they say.

A pickle is a program: it names functions of any installed package, which its reader calls. Here a
name counts only if it is torch's way to make a tensor, or plain data. Of classes that lie beside
the weights in such files (states of random numbers, of Transformer Engine) nothing is imported
either: a :class:`StandIn` takes the place of their objects. Any other name is refused, unless the
user says that the file is to be trusted.
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
from megapipe.words import one_line

TRUST = "--trust-pickle"
TRUST_MEANS = (
    "let a pickled file run any code of its own, as this user; without it one that would is refused"
)

_BESIDE_WEIGHTS = (
    *("megatron.", "transformer_engine.", "numpy.", "torch.distributed.checkpoint.planner."),
    *("io.BytesIO", "_io.BytesIO", "signal.Signals", "types.SimpleNamespace", "pathlib."),
    "builtins.getattr",  # how Python 3.11 pickles a member of an enumeration
)
"""Beginnings of names whose objects nothing here looks at."""


class StandIn:
    """An object of a class that is not imported. It takes what a pickle gives to such an object,
    and keeps none of it."""

    def __new__(cls, *args: object) -> StandIn:
        """An object, whatever the class would have been given."""
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        """Nothing is kept."""

    def __setstate__(self, state: object) -> None:
        """Nothing is kept."""


def is_beside_weights(name: str) -> bool:
    """Whether a :class:`StandIn` may take the place of objects of ``module.class``."""
    return name.startswith(_BESIDE_WEIGHTS)


def untrusted(path: Path, name: str) -> CheckpointError:
    """The error for a file that names `name`, which is no tensor and no plain data."""
    return CheckpointError(
        f"{path}: it is pickled and would run {name}; {TRUST} allows that, for a file of somebody "
        "you trust"
    )


def load(path: Path, *, trust: bool) -> Any:
    """The content of a file that ``torch.save`` has written; tensors are mapped, not read.

    With `trust` the file may run any code, as ``pickle.load`` lets it.

    Raises:
        CheckpointError: the file is missing or damaged, or needs trust that it does not have.
    """
    try:
        with path.open("rb") as file:
            mapped = zipfile.is_zipfile(file)  # not so before torch 1.6
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        if trust:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
        with torch.serialization.safe_globals(_allowed(path) if mapped else [Namespace]):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError:  # torch's text has a page of advice
        raise CheckpointError(
            f"{path}: damaged, or it cannot be read without {TRUST}, which runs code of its own"
        ) from None
    except Exception as error:  # whatever a damaged file, or code of a trusted one, brings up
        raise CheckpointError(
            f"{path}: not a whole file of torch.save: {one_line(error)}"
        ) from None


def _allowed(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Names that the file may have beside torch's own. Raises CheckpointError for any other."""
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [Namespace]
    for name in sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
        if is_beside_weights(name):
            allowed.append((StandIn, name))
        elif name != "argparse.Namespace":
            raise untrusted(path, name)
    return allowed
