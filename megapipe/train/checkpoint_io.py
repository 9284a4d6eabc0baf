"""Training state to checkpoint pieces and back.

A rank writes the slices that it owns: flat ranges of its regions of the global tensors, cut into
rectangles, without the padding of the vocabulary. A rank reads the regions that its layout needs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from torch import Tensor

from megapipe.checkpoint.reader import Checkpoint, readers
from megapipe.checkpoint.regions import flat_regions
from megapipe.checkpoint.stateful import TensorReader
from megapipe.checkpoint.writer import Piece
from megapipe.layers.parameter import LocalParameter
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.state_store import VELOCITY


def pieces(optimizer: Optimizer) -> Iterator[Piece]:
    """This rank's part of a checkpoint: master weights and states, named by what they are
    ("model/<name>", "optimizer.exp_avg/<name>"), and older versions of the weights that are still
    read ("stash.1/<name>", the last but one, and so on)."""
    for owned in optimizer.own_slices():
        spec = owned.spec
        for position, local in flat_regions(spec.sizes, owned.start, owned.stop):
            for inside, region in spec.global_regions(local):
                for kind, flat in owned.values.items():
                    values = flat[position : position + local.numel].view(local.sizes)
                    yield Piece(
                        f"{kind}/{spec.name}", spec.shape, region, values[inside].contiguous()
                    )


def read_region(checkpoint: TensorReader, kind: str, spec: LocalParameter, out: Tensor) -> None:
    """Fill `out`, this rank's part of ``kind/name``, from a checkpoint of any layout; padding
    beyond the true shape is left alone."""
    for inside, region in spec.global_regions():
        checkpoint.read_into(out[inside], f"{kind}/{spec.name}", region)


def files_needed(
    optimizer: Optimizer, checkpoint: Checkpoint, beside: Iterable[str] = ()
) -> set[str]:
    """The files of a checkpoint that :func:`load` reads on this rank, and those with all of the
    entries `beside`."""
    files: set[str] = set()
    for name in beside:
        files |= checkpoint.files_with(name)
    older = sorted({name.partition("/")[0] for name in checkpoint.names() if name[:6] == "stash."})
    weights = [spec for kind, spec in optimizer.loaded() if kind == "model"]
    of_older = ((kind, spec) for kind in older for spec in weights)
    for kind, spec in (*optimizer.loaded(), *of_older):
        for _, region in spec.global_regions():
            files |= checkpoint.files_with(f"{kind}/{spec.name}", region)
    return files


def load(optimizer: Optimizer, checkpoint: Checkpoint, updates: int, lr: float) -> None:
    """Set weights and optimizer states, which have seen `updates`, the last one with learning rate
    `lr`, to those of a checkpoint. Weights of which it has no velocity begin without one."""
    load_weights(optimizer, checkpoint)
    names = set(checkpoint.names())

    def fill(name: str, spec: LocalParameter, out: Tensor) -> None:
        kind = f"optimizer.{name}"
        if name == VELOCITY and f"{kind}/{spec.name}" not in names:
            out.zero_()
        else:
            read_region(checkpoint, kind, spec, out)

    optimizer.set_states(
        updates,
        fill,
        lr=lr,
        threads=readers(checkpoint.path),
    )


def load_weights(
    optimizer: Optimizer, weights: TensorReader, *, fresh: Container[str] = (), seed: int = 0
) -> None:
    """Set the weights alone; those named in `fresh` get the initial values of `seed`."""

    def fill(spec: LocalParameter, out: Tensor) -> None:
        if spec.name in fresh:
            spec.initialise(out, seed)
        else:
            read_region(weights, "model", spec, out)

    optimizer.set_weights(
        fill, threads=readers(weights.path) if isinstance(weights, Checkpoint) else 0
    )
