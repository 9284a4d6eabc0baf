"""Weights of a dense model as those of one with experts: each expert begins as a copy of the MLP.

A token's result is then that of the dense model, whichever experts it goes to, where the weights of
its choices sum to 1 (`model.moe.normalise` with `scale` 1) and none is dropped (Komatsuzaki et al.,
2212.05055). Routers begin afresh, their biases at 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.stateful import TensorReader
from megapipe.checkpoint.storage import StorageLocation
from megapipe.cli import flatten
from megapipe.config.config import Config
from megapipe.errors import CheckpointError

_OF_EXPERTS = re.compile(r"(.*layers\.\d+\.)moe\.((?:up|down)\.\w+)")
_MIXTURE = "model.moe."


@dataclass(frozen=True)
class Upcycled:
    """Dense `weights` as a run with experts reads them, in the place of a checkpoint that has
    weights alone. Make one with :meth:`of`."""

    weights: TensorReader
    config: Mapping[str, JsonValue]
    """The keys of the dense model, with those of the run for its experts."""

    @classmethod
    def of(cls, weights: TensorReader, config: Config) -> Upcycled:
        """Raises CheckpointError where `weights` have experts or an MLP of another width."""
        stored, run = weights.config, flatten(config)
        if (experts := stored.get("model.moe.experts")) is not None:
            raise CheckpointError(
                f"{weights.path} has model.moe.experts={experts} already: expected a dense model "
                "with checkpoint.upcycle=true"
            )
        width = stored.get("model.ffn_hidden")
        if width != config.model.moe.ffn:
            raise CheckpointError(
                f"{weights.path} has model.ffn_hidden={width}, of which experts with "
                f"model.moe.ffn={config.model.moe.ffn} are no copies: expected {width}"
            )
        own = {key: value for key, value in run.items() if key.startswith(_MIXTURE)}
        return cls(weights, {**stored, **own})

    @property
    def path(self) -> StorageLocation:
        """Where the dense weights are."""
        return self.weights.path

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless there is exactly what these tensors are made of."""
        needed = {}
        for name, shape in shapes.items():
            if _is_fresh(name):
                continue
            of_experts = _OF_EXPERTS.fullmatch(name)
            needed[_dense(name)] = shape[1:] if of_experts else shape
        self.weights.match(needed)

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out`, on the host, with a region of a tensor; raises CheckpointError."""
        if _is_fresh(name):
            out.zero_()
            return
        if not _OF_EXPERTS.fullmatch(name):
            self.weights.read_into(out, name, region)
            return
        inner = Region(region.offsets[1:], region.sizes[1:])
        self.weights.read_into(out[0], _dense(name), inner)
        out[1:].copy_(out[0].expand_as(out[1:]))


def without_source(names: Iterable[str]) -> set[str]:
    """Tensors of a model with experts that nothing in a dense one becomes: those of routers."""
    return set(filter(_is_fresh, names))


def _is_fresh(name: str) -> bool:
    return ".moe." in name and not _OF_EXPERTS.fullmatch(name)


def _dense(name: str) -> str:
    return _OF_EXPERTS.sub(r"\1mlp.\2", name)
