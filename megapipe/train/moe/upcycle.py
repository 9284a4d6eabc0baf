"""Upcycling: a dense model's weights in an MoE model; each expert is initially equal to the MLP.

A token's result then equals the dense model's, whichever experts it goes to, if the weights of its
choices sum to 1 (`model.moe.norm_topk_prob` with `scale` 1) and no token is dropped (Komatsuzaki et
al., 2212.05055). Routers start with new weights, and with biases of 0.
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
    """Dense `weights` that are read as the weights of an MoE model, like a weights-only checkpoint.
    Made with :meth:`of`."""

    weights: TensorReader
    config: Mapping[str, JsonValue]
    """Configuration of the dense model, with the run's settings of the section `model.moe`."""

    @classmethod
    def of(cls, weights: TensorReader, config: Config) -> Upcycled:
        """Wrap `weights`; raises CheckpointError if they have experts or another FFN size."""
        stored, run = weights.config, flatten(config)
        if (experts := stored.get("model.moe.num_experts")) is not None:
            raise CheckpointError(
                f"{weights.path} already has model.moe.num_experts={experts}: expected a "
                "dense model with checkpoint.upcycle=true"
            )
        width = stored.get("model.ffn_hidden")
        if width != config.model.moe.expert_ffn_hidden:
            raise CheckpointError(
                f"{weights.path} has model.ffn_hidden={width}, but "
                f"model.moe.expert_ffn_hidden={config.model.moe.expert_ffn_hidden}: experts "
                f"are copies of its MLP, so expected {width}"
            )
        own = {key: value for key, value in run.items() if key.startswith(_MIXTURE)}
        return cls(weights, {**stored, **own})

    @property
    def path(self) -> StorageLocation:
        """Location of the dense weights."""
        return self.weights.path

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the dense weights are exactly those that `shapes` need."""
        needed = {}
        for name, shape in shapes.items():
            if _is_fresh(name):
                continue
            of_experts = _OF_EXPERTS.fullmatch(name)
            needed[_dense(name)] = shape[1:] if of_experts else shape
        self.weights.match(needed)

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out`, on the host, with a region of an MoE tensor; raises CheckpointError."""
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
    """Return the names of MoE tensors that a dense model lacks: those of routers."""
    return set(filter(_is_fresh, names))


def _is_fresh(name: str) -> bool:
    return ".moe." in name and not _OF_EXPERTS.fullmatch(name)


def _dense(name: str) -> str:
    return _OF_EXPERTS.sub(r"\1mlp.\2", name)
