"""The layouts that a search looks at, as values of configuration keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.config.config import Config

FUSED = ("1f1b", "interleaved_1f1b", "gpipe")
"""Schedules with fused backwards: after a rank's last one, gradients pass the ranks before it."""
SCHEDULES: Mapping[str, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4, 5, 6, 8),
    "zb_h1": (1,),
    "zb_2p": (1,),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "gpipe": (1,),
}
"""Searched schedules with their numbers of model chunks. The stages of their first chunk are on the
ranks in order; :meth:`~megapipe.plan.search.estimate.ShapeCost.least_seconds` assumes that."""
POLICIES = ("keep", "selective", "full")
SMALLEST_SHARD = 4096
"""Minimum number of positions of a sequence on a context-parallel rank; fewer would mostly wait."""

Keys = Mapping[str, str | int | bool]


class Shape(NamedTuple):
    """Part of a layout on which a layer's kernels and saved activations depend."""

    tp: int
    cp: int
    ep: int
    microbatch: int
    policy: str


@dataclass(frozen=True)
class LayoutChoice:
    """A layout: values of all keys that a search varies."""

    shape: Shape
    dp: int
    pp: int
    schedule: str
    chunks: int
    zero: int

    @property
    def keys(self) -> Keys:
        """Configuration keys with their values."""
        shape = self.shape
        found: dict[str, str | int | bool] = {
            "parallel.dp": self.dp,
            "parallel.tp": shape.tp,
            "parallel.pp": self.pp,
            "parallel.cp": shape.cp,
            "parallel.ep": shape.ep,
            "parallel.sequence_parallel": shape.tp > 1,
            "pipeline.schedule": self.schedule,
            "train.microbatch": shape.microbatch,
            "activations.policy": shape.policy,
            "optimizer.zero": self.zero,
        }
        if self.chunks > 1:
            found["pipeline.chunks"] = self.chunks
        return found

    @property
    def text(self) -> str:
        """Keys with their values as words of a command line."""
        return " ".join(words_of(self.keys))

    def difference(self, other: LayoutChoice) -> str:
        """Return the keys, with values, that differ from those of another layout."""
        own, theirs = ({"pipeline.chunks": 1, **each.keys} for each in (self, other))
        return " ".join(words_of({key: own[key] for key in own if own[key] != theirs[key]}))

    def matches(self, fixed: Mapping[str, str]) -> bool:
        """Whether the layout has the `fixed` values of keys that a search varies."""
        return all(self.value(key) == value.lower() for key, value in fixed.items())

    def value(self, key: str) -> str:
        """Return the value of a key of :data:`VARIED` as text."""
        return str({"pipeline.chunks": self.chunks, **self.keys}[key]).lower()


def words_of(keys: Keys) -> list[str]:
    """Return keys and values as words of a command line."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in keys.items()
    ]


VARIED = (*LayoutChoice(Shape(1, 1, 1, 1, "keep"), 1, 1, "1f1b", 2, 1).keys,)
"""Names of the keys that a search varies."""


def layouts(config: Config, gpus: int, ranks_per_node: int) -> Iterator[LayoutChoice]:
    """Yield every layout of a model on `gpus` devices whose sizes divide each other as needed.

    Some of them can still be refused when they are resolved. Tensor-parallel groups stay within a
    node.
    """
    model, train = config.model, config.train
    heads = model.kv_heads or model.heads
    for tp in _divisors(min(ranks_per_node, gpus)):
        if gpus % tp or heads % tp:
            continue
        for cp, pp in _splits(config, gpus // tp):
            dp = gpus // (tp * cp * pp)
            for microbatch in (1, 2, 4, 8):
                if train.global_batch % (dp * microbatch):
                    continue
                count = train.global_batch // (dp * microbatch)
                for ep in _expert_sizes(config, dp * cp):
                    for policy in POLICIES:
                        shape = Shape(tp, cp, ep, microbatch, policy)
                        yield from _pipelines(config, shape, dp, pp, count)


def _pipelines(
    config: Config, shape: Shape, dp: int, pp: int, microbatches: int
) -> Iterator[LayoutChoice]:
    """Yield the pipelines of a mesh: schedules and ZeRO stages."""
    if pp == 1:
        for zero in (1, 3) if dp > 1 else (1,):
            yield LayoutChoice(shape, dp, 1, "1f1b", 1, zero)
        return
    if microbatches < pp:
        return
    for schedule, numbers in SCHEDULES.items():
        for chunks in numbers:
            whole = schedule != "interleaved_1f1b" or microbatches % pp == 0
            if whole and pp * chunks <= config.model.layers:
                yield LayoutChoice(shape, dp, pp, schedule, chunks, 1)


def _splits(config: Config, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield context- and pipeline-parallel sizes of `ranks` devices."""
    length = config.train.sequence_length
    for cp in (size for size in _divisors(ranks) if size & (size - 1) == 0):
        if cp > 1 and length < cp * SMALLEST_SHARD:
            break
        for pp in _divisors(ranks // cp):
            if pp <= config.model.layers:
                yield cp, pp


def _expert_sizes(config: Config, ranks: int) -> Sequence[int]:
    """Return the expert-parallel sizes among `ranks` devices; 1 for a dense model."""
    experts = config.model.moe.num_experts
    if experts is None:
        return [1]
    number = max(experts) if isinstance(experts, list) else experts
    return [size for size in _divisors(ranks) if number % size == 0]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
