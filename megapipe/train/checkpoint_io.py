"""Training state to checkpoint pieces and back.

A rank writes the slices that it owns: flat ranges of its regions of the global tensors, cut into
rectangles, without the padding of the vocabulary. A rank reads the regions that its layout needs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.reader import Checkpoint, readers
from megapipe.checkpoint.regions import Region, flat_regions
from megapipe.checkpoint.storage import Place
from megapipe.checkpoint.writer import Meta, Piece
from megapipe.cli import flatten
from megapipe.config import Config
from megapipe.layers.parameter import LocalParameter
from megapipe.layout.layout import Layout
from megapipe.left_out import LeftOut
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.state_store import VELOCITY
from megapipe.plan.memory import checkpoint_bytes


class Weights(Protocol):
    """Global tensors to be read by regions: a checkpoint, or what takes the place of one."""

    @property
    def path(self) -> Place:
        """Where it is."""

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Keys of the run's configuration, those of the model at least."""

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless it has exactly these tensors, ``model/...``."""

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out`, on the host, with a region of a tensor; raises CheckpointError."""


class Content(NamedTuple):
    """A rank's arguments of :func:`megapipe.checkpoint.save`."""

    step: int
    meta: Meta
    pieces: Iterator[Piece]
    nbytes: int
    """Of the pieces of all ranks."""


def content(
    config: Config,
    layout: Layout,
    optimizer: Optimizer,
    *,
    run_id: str,
    step: int,
    samples: int,
    left_out: LeftOut,
    order: str,
    loss_scale: Mapping[str, float],
    judged: Mapping[str, JsonValue],
    digests: Mapping[str, str],
    beside: Iterable[Piece] = (),
    owners: Mapping[str, Sequence[int]] | None = None,
    stream: str | None = None,
) -> Content:
    """The state after `step` steps, which took `samples` samples in `order`, but for those that are
    `left_out`. `beside` is this rank's part of what the optimizer does not have, `owners` has the
    ranks of experts that have moved, by layer, and `stream` names the stream that older versions of
    the weights belong to."""
    axes = (
        "pp",
        "dp",
        "cp",
        "tp",
        *(name for name in ("ep", "etp") if getattr(layout, name) > 1),
        "chunks",
    )
    meta = Meta(
        run_id=run_id,
        layout={name: getattr(layout, name) for name in axes},
        coordinates={
            "step": step,
            "samples": samples,
            "left_out": [list[JsonValue](each) for each in left_out.ranges],
            "order": order,
            "updates": optimizer.count,
            "lr": optimizer.lr,
            "loss_scale": dict(loss_scale),
            "judged": dict(judged),
            "threads": torch.get_num_threads(),
            **(
                {"owners": {n: list[JsonValue](own) for n, own in owners.items()}} if owners else {}
            ),
            **({} if stream is None else {"stream": stream}),
        },
        config=flatten(config),
        digests=dict(digests),
    )
    own = chain(pieces(optimizer), beside)
    return Content(step, meta, own, checkpoint_bytes(config, layout))


def pieces(optimizer: Optimizer) -> Iterator[Piece]:
    """This rank's part of a checkpoint: master weights and states, named by what they are
    ("model/<name>", "optimizer.exp_avg/<name>"), and older versions of the weights that are still
    read ("stash.1/<name>", the last but one, and so on)."""
    for owned in optimizer.own_slices():
        spec = owned.spec
        for position, local in flat_regions(spec.sizes, owned.start, owned.stop):
            for inside, region in spec.placed(local):
                for kind, flat in owned.values.items():
                    values = flat[position : position + local.numel].view(local.sizes)
                    yield Piece(
                        f"{kind}/{spec.name}", spec.shape, region, values[inside].contiguous()
                    )


def read_region(checkpoint: Weights, kind: str, spec: LocalParameter, out: Tensor) -> None:
    """Fill `out`, this rank's part of ``kind/name``, from a checkpoint of any layout; padding
    beyond the true shape is left alone."""
    for inside, region in spec.placed():
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
        for _, region in spec.placed():
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
    optimizer: Optimizer, weights: Weights, *, fresh: Container[str] = (), seed: int = 0
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
