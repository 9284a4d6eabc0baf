"""Raises the error of one rank on every rank."""

from __future__ import annotations

from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import MegapipeError


def raise_on_all(mesh: ParallelMesh, error: MegapipeError | None) -> None:
    """Raise the `error` of any rank on every rank, with its exit code. Collective over all ranks.

    If several ranks pass errors, each of them raises its own.
    """
    text = mesh.agree(None if error is None else f"{error.exit_code} {error}")
    if text is None:
        return
    if error is not None:
        raise error
    code, _, message = text.partition(" ")
    kinds = {kind.exit_code: kind for kind in MegapipeError.__subclasses__()}
    raise kinds.get(int(code), MegapipeError)(message)
