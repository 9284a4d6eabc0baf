"""The layouts that a search looks at, as values of configuration keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.config.strict_yaml import text_of

SCHEDULES: Mapping[str, tuple[int | None, ...]] = {
    "1f1b": (None,),
    "interleaved_1f1b": (2, 3, 4, 5, 6, 8),
    "zb_h1": (None,),
    "zb_h2": (None,),
    "zb_1p": (None,),
    "zb_2p": (None,),
    "zb_v": (2,),
    "v_zb": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (None,),
    "dualpipe": (None,),
    "1f1b_v": (2,),
    "hanayo": (2, 4),
    "bitpipe": (2,),
    "chimera": (None,),
    "chimera_forward_doubling": (None,),
    "chimera_backward_halving": (None,),
    "autopipe": (None,),
    "eager_1f1b": (None,),
    "grouped_interleaved": (2, 4),
    "breadth_first": (2, 4),
    "gpipe": (None,),
    "varuna": (None,),
    "merak": (None,),
    "gems": (None,),
    "naive": (None,),
}
"""Searched schedules with their numbers of model chunks; None: the schedule's own. Schedules that
cut sequences into slices are looked at where ``pipeline.schedule`` names them."""
SHARDED: Mapping[str, tuple[int | None, ...]] = {
    "breadth_first": (4, 8, 16, 32),
    "interleaved_1f1b": (4, 8, 16, 32),
}
"""Searched schedules of ZeRO 3 on one pipeline rank, with their numbers of chunks: weights are
gathered a chunk at a time."""
POLICIES = ("keep", "selective", "full")
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 32_768
"""Maximum number of tokens of a micro-batch of more than :data:`FEW` samples: with fewer tokens,
kernels of a small model are too short for their device."""
FEW = 8
SMALLEST_SHARD = 4096
"""Minimum number of positions of a sequence on a context-parallel rank; fewer would mostly wait."""

Keys = Mapping[str, Any]
"""Values of configuration keys: text, numbers, booleans and lists of them."""


class Shape(NamedTuple):
    """Part of a layout on which a layer's kernels and saved activations depend."""

    tp: int
    cp: int
    ep: int
    microbatch: int
    policy: str
    sequence_parallel: bool


@dataclass(frozen=True)
class LayoutChoice:
    """A layout: values of all keys that a search varies."""

    shape: Shape
    dp: int
    pp: int
    schedule: str
    chunks: int | None
    """Model chunks of a rank; None: the schedule's own number."""
    zero: int
    by_stage: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Keys with a value for each stage, in place of those above."""

    def with_stages(self, changes: Mapping[str, Sequence[Any]]) -> LayoutChoice:
        """Return the layout with other values by stage."""
        found = {**dict(self.by_stage), **{key: tuple(each) for key, each in changes.items()}}
        return replace(self, by_stage=tuple(found.items()))

    @property
    def keys(self) -> Keys:
        """Configuration keys with their values."""
        shape = self.shape
        found: dict[str, Any] = {
            "parallel.dp": self.dp,
            "parallel.tp": shape.tp,
            "parallel.pp": self.pp,
            "parallel.cp": shape.cp,
            "parallel.ep": shape.ep,
            "parallel.sequence_parallel": shape.sequence_parallel,
            "pipeline.schedule": self.schedule,
            "train.microbatch": shape.microbatch,
            "activations.policy": shape.policy,
            "optimizer.zero": self.zero,
        }
        if self.chunks is not None:
            found["pipeline.chunks"] = self.chunks
        return {**found, **{key: list(values) for key, values in self.by_stage}}

    @property
    def text(self) -> str:
        """Keys with their values as words of a command line."""
        return " ".join(words_of(self.keys))

    def difference(self, other: LayoutChoice) -> str:
        """Return the keys, with values, that differ from those of another layout."""
        own, theirs = self.keys, other.keys
        values = {key: own.get(key, "unset") for key in {**own, **theirs}}
        return " ".join(words_of({k: v for k, v in values.items() if v != theirs.get(k, "unset")}))


def words_of(keys: Keys) -> list[str]:
    """Return keys and values as words of a command line."""
    return [f"{key}={text_of(value).replace(', ', ',')}" for key, value in keys.items()]


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key (section.key)."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return `config` with other values of `keys` (section.key), which must be of the right
    types."""
    sections = dict[str, dict[str, Any]]()
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )


DEFAULTS: Mapping[str, Any] = {
    **LayoutChoice(Shape(1, 1, 1, 1, "keep", False), 1, 1, "1f1b", None, 1).keys,
    "parallel.dp": None,
    "pipeline.chunks": None,
}
"""Keys that a search can vary, with the values that a configuration of such a search has."""
VARIED = (*DEFAULTS,)
"""Names of the keys that a search can vary."""


class _Space(NamedTuple):
    """A configuration, and the keys whose values are free."""

    config: Config
    free: Collection[str]

    def values(self, key: str, candidates: Sequence[Any]) -> Sequence[Any]:
        """Return the candidates of a free key, or the value of another key."""
        if key in self.free:
            return candidates
        return [value_of(self.config, key)]


def layouts(config: Config, free: Collection[str], gpus: int) -> Iterator[LayoutChoice]:
    """Yield every layout of a model on `gpus` devices whose sizes divide each other as needed.

    Keys of :data:`VARIED` that are not in `free` keep the values of `config`; ``parallel.dp``, if
    it has none, follows from the other sizes. Some layouts can still be refused when they are
    resolved. Free tensor-parallel groups stay within a node.
    """
    space, model, train = _Space(config, free), config.model, config.train
    heads = model.kv_heads or model.heads
    fitting = [each for each in MICROBATCHES if each * train.sequence_length <= MOST_TOKENS]
    sizes_of_microbatch = [each for each in MICROBATCHES if each <= FEW or each in fitting]
    sizes = _divisors(min(config.parallel.ranks_per_node, gpus))
    for tp in space.values("parallel.tp", [tp for tp in sizes if heads % tp == 0]):
        if gpus % tp:
            continue
        for cp, pp in _splits(space, gpus // tp):
            dp = gpus // (tp * cp * pp)
            if dp not in [each or dp for each in space.values("parallel.dp", [dp])]:
                continue
            for microbatch in space.values("train.microbatch", sizes_of_microbatch):
                if train.global_batch % (dp * microbatch):
                    continue
                count = train.global_batch // (dp * microbatch)
                for ep in space.values("parallel.ep", _expert_sizes(config, dp * cp)):
                    for policy in space.values("activations.policy", POLICIES):
                        for split in space.values("parallel.sequence_parallel", [tp > 1]):
                            shape = Shape(tp, cp, ep, microbatch, policy, split)
                            yield from _pipelines(space, shape, dp, pp, count)


def _pipelines(
    space: _Space, shape: Shape, dp: int, pp: int, microbatches: int
) -> Iterator[LayoutChoice]:
    """Yield the pipelines of a mesh: schedules and ZeRO stages."""
    stages = [1] if pp > 1 or dp == 1 else [1, 3]
    free, layers = space.free, space.config.model.layers
    for zero in space.values("optimizer.zero", stages):
        if pp > 1:
            schedules = SCHEDULES
        else:
            schedules = SHARDED if zero == 3 and dp > 1 else {"1f1b": (None,)}
        for schedule in space.values("pipeline.schedule", [*schedules]):
            if "pipeline.schedule" in free and microbatches < pp:
                continue
            for chunks in space.values("pipeline.chunks", _chunks(schedules, schedule)):
                whole = schedule != "interleaved_1f1b" or microbatches % pp == 0
                if whole and pp * (chunks or 1) <= layers:
                    yield LayoutChoice(shape, dp, pp, schedule, chunks, zero)


def _chunks(searched: Mapping[str, Sequence[int | None]], schedule: str) -> Sequence[int | None]:
    """Return the numbers of chunks to look at of a schedule, which may be a fixed one."""
    return searched.get(schedule, SCHEDULES.get(schedule, (None,)))


def _splits(space: _Space, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield context- and pipeline-parallel sizes of `ranks` devices."""
    length, layers = space.config.train.sequence_length, space.config.model.layers
    sizes = [size for size in _divisors(ranks) if size & (size - 1) == 0]
    fitting = [size for size in sizes if size == 1 or length >= size * SMALLEST_SHARD]
    for cp in space.values("parallel.cp", fitting):
        divisors = [size for size in _divisors(ranks // cp) if size <= layers]
        for pp in space.values("parallel.pp", divisors):
            if ranks % (cp * pp) == 0:
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
