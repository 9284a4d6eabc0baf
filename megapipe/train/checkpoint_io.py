"""Conversion of training state to checkpoint pieces and back.

Each rank writes the values that it owns: flat ranges of its shards of global tensors. They are cut
into rectangles, without vocabulary padding. Each rank reads the regions that its layout needs.
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
    """Yield this rank's part of a checkpoint. Master weights are named "model/<name>", states
    "optimizer.exp_avg/<name>" and so on. Older weight versions that are still read are named
    "stash.1/<name>" (the newest of them), "stash.2/<name>" and so on."""
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
    """Fill `out`, this rank's shard of the entry ``<kind>/<name of spec>``, from a checkpoint of
    any layout. Padding is left as it is."""
    for inside, region in spec.global_regions():
        checkpoint.read_into(out[inside], f"{kind}/{spec.name}", region)


def files_needed(
    optimizer: Optimizer, checkpoint: Checkpoint, beside: Iterable[str] = ()
) -> set[str]:
    """Return the checkpoint files that this rank needs: those with regions that :func:`load` reads,
    and all files of the entries `beside`."""
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
    """Load weights and optimizer states. `updates`: number of updates before the checkpoint. `lr`:
    learning rate of the last update. A velocity that is not stored starts at 0."""
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
    """Load only weights. Weights named in `fresh` are initialised from `seed` instead."""

    def fill(spec: LocalParameter, out: Tensor) -> None:
        if spec.name in fresh:
            spec.initialise(out, seed)
        else:
            read_region(weights, "model", spec, out)

    optimizer.set_weights(
        fill, threads=readers(weights.path) if isinstance(weights, Checkpoint) else 0
    )
