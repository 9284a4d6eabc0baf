"""Measured costs of a layout's stages, cached. Only measuring loads torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.command_line import phase
from megapipe.config.config import Config
from megapipe.config.plan import PlanConfig
from megapipe.distributed.grid import MeshCoordinates
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.layout.layout import Layout
from megapipe.model.partition import StageSpec
from megapipe.plan.cache import Cache, key_of, user_cache
from megapipe.plan.segments import Measured, Part, Short, part_of, shortened, units_of
from megapipe.plan.unit import Operation, Unit
from megapipe.schedule.generators import gpipe_on
from megapipe.util.no_symlinks import make_folder
from megapipe.util.user_code import is_user_code

if TYPE_CHECKING:
    from megapipe.plan.results import Results

SECTIONS = ("model", "lora", "kernels", "experts", "context")
"""Configuration sections on which stages depend; :func:`_others` returns keys of other sections."""


class Units:
    """Measured costs of a layout's stages, per micro-batch."""

    def __init__(self, config: Config, layout: Layout, cache: Cache | None = None) -> None:
        self.config, self.layout = config, layout
        self._cache = cache or Cache()
        self._measured: dict[str, Measured] = {}
        self._units: dict[tuple[int, int | None, Fraction | None, int], list[Unit]] = {}
        self._layers: dict[tuple[Hashable, str, int | None], Unit] = {}
        self._places: dict[Callable[[Unit], float], int] = {}
        self._rings: dict[tuple[Hashable, BlockPolicy, bool], dict[int, list[Unit]]] = {}

    def of(
        self,
        stage: int,
        *,
        rows: int | None = None,
        imbalance: Fraction | None = None,
        index: int | None = None,
    ) -> list[Unit]:
        """Return the costs of a stage, one :class:`Unit` for each slice of its sequences. `index`:
        cp index of the rank; default: the index that takes most bytes on its device.

        `rows`: number of samples; default: a whole micro-batch. `imbalance`: rows of the rank's
        experts relative to the mean.
        """
        if index is None:
            index = self.index_with_most(stage, _peaks)
        stage = self.alike[stage]
        key = stage, rows, imbalance, index
        if key not in self._units:
            part = part_of(self.layout, stage)
            self._units[key] = self._measure(part, index, rows, imbalance)
        return self._units[key]

    @cached_property
    def alike(self) -> Sequence[int]:
        """For each stage, the first stage whose costs are the same."""
        first: dict[Short, int] = {}
        shorts = (
            shortened(part_of(self.layout, n), self._kinds) for n in range(self.layout.stages)
        )
        return [first.setdefault(short, stage) for stage, short in enumerate(shorts)]

    def index_with_most(self, stage: int, size: Callable[[Unit], float]) -> int:
        """Return the cp index at which the `size` of a stage's first layer is largest; ties go to
        the index that takes most bytes on its device."""
        part = part_of(self.layout, stage)
        if self.layout.split.ring == 1 or not part.spec.layers:
            return 0
        if size not in self._places:
            own = self._around_ring(part.spec.layers[0], part.spans[0].policy, part.recompute)
            self._places[size] = max(
                own, key=lambda at: (sum(map(size, own[at])), sum(map(_peaks, own[at])))
            )
        return self._places[size]

    def mean(self, stage: int, size: Callable[[Unit], float]) -> float:
        """Return the `size` of a stage on a micro-batch, as the mean over ring ranks."""
        part, found = part_of(self.layout, stage), float(sum(map(size, self.of(stage))))
        if self.layout.split.ring > 1:
            index = self.index_with_most(stage, _peaks)
            policies = (span.policy for span in part.spans for _ in range(span.blocks))
            more: dict[int, float] = {}  # equal layers share the costs around their ring
            for layer, policy in zip(part.spec.layers, policies, strict=True):
                around = self._around_ring(layer, policy, part.recompute)
                if id(around) not in more:
                    own = {at: sum(map(size, units)) for at, units in around.items()}
                    more[id(around)] = sum(own.values()) / len(own) - own[index]
                found += more[id(around)]
        return found

    def flops(self, stage: int, operation: Operation) -> float:
        """Return the FLOPs of an operation on a micro-batch, as the mean over ring ranks."""
        return self.mean(stage, lambda unit: unit.flops(operation))

    def _around_ring(
        self, layer: int, policy: BlockPolicy, recompute: bool
    ) -> dict[int, list[Unit]]:
        """Measure a layer on each rank of a ring; return its costs by cp index."""
        kind = self.layout.model.kind(layer), policy, recompute
        if kind not in self._rings:
            part, split = _single(layer, policy, recompute), self.layout.split
            places = (split.index(i, 0) for i in range(split.ring))
            self._rings[kind] = {at: self._measure(part, at, None, None) for at in places}
        return self._rings[kind]

    def of_layer(self, layer: int, dispatch: str, node: int | None = None) -> Unit:
        """Return the costs of one MoE layer with an ``experts.dispatch`` and one expert chunk.

        Experts are chosen evenly, sequences are not cut, and nothing is recomputed. `node`: number
        of ranks per node, for hierarchical dispatch.
        """
        key = self.layout.model.kind(layer), dispatch, node
        if key not in self._layers:
            form = {
                "dispatch": dispatch,
                "ranks_per_node": node or self.config.experts.ranks_per_node,
                "overlap_chunks": 1,
            }
            experts = self.config.experts.model_copy(update=form)
            config = self.config.model_copy(update={"experts": experts})
            layout = replace(
                self.layout,
                ranks_per_node=node,
                slice_lengths=(self.config.train.sequence_length,),
                schedule=gpipe_on(self.layout.schedule.placement, 1),
            )
            units, one = Units(config, layout, self._cache), _single(layer, BlockPolicy(), False)
            (self._layers[key],) = units._measure(one, 0, None, Fraction(1))
        return self._layers[key]

    @cached_property
    def _results(self) -> Results:
        """Cache of operations' results that all runs on the meta device share."""
        from megapipe.plan.results import Results

        return Results()

    def assuming(self, plan: PlanConfig) -> Units:
        """Return the costs for other assumed speeds. What is measured does not depend on them."""
        other = copy(self)
        other.config = self.config.model_copy(update={"plan": plan})
        return other

    @cached_property
    def without_recomputation(self) -> Units:
        """Costs of the same layout if layers save all their activations."""
        spans = self.layout.block_policies
        if not any(span.policy.recompute for own in spans for span in own):
            return self
        kept = [
            [BlockSpan(sum(span.blocks for span in own), BlockPolicy())] * bool(own)
            for own in spans
        ]
        layout = replace(self.layout, block_policies=tuple(map(tuple, kept)))
        return Units(self.config, layout, self._cache)

    def _measure(
        self, part: Part, index: int, rows: int | None, imbalance: Fraction | None
    ) -> list[Unit]:
        config, layout = self.config, self.layout
        short = shortened(part, self._kinds)
        rows = rows or config.train.microbatch
        key = self._key(short.part, rows, index, imbalance)

        def run() -> Measured:
            with phase("running stages on the meta device"):
                from megapipe.plan.run import run_part

                at, part, given = MeshCoordinates(0, 0, index, 0), short.part, self._results
                return run_part(
                    config, layout, part, rows, at=at, imbalance=imbalance, results=given
                )

        if key not in self._measured:
            kept = Cache([]) if has_user_code(config) else self._cache
            self._measured[key] = kept.get(key, Measured, run)
        return units_of(self._measured[key], short)

    def _key(self, part: Part, rows: int, index: int, imbalance: Fraction | None) -> str:
        everything = {
            **self._shared_key,
            "part": [repr(part.spec), *map(_sorted, part.spans), part.recompute],
            "piece": [rows, index, str(imbalance)],
        }
        return key_of(**everything)

    @cached_property
    def _kinds(self) -> list[Hashable]:
        model = self.layout.model
        return [model.kind(layer) for layer in range(model.layers)]

    @cached_property
    def _shared_key(self) -> Mapping[str, Any]:
        """Entries of the cache key that are equal for all parts of the layout."""
        config, layout = self.config, self.layout
        return {
            "device": layout.device,
            "sections": config.model_dump(mode="json", include=set(SECTIONS)),
            **_others(config, layout),
        }


def units_of_run(config: Config, layout: Layout) -> Units:
    """Make the costs of a run; they are also cached in its folder, in `units`."""
    folders = [user_cache()]
    with contextlib.suppress(OSError):
        folders.insert(0, make_folder(Path(config.run.folder) / config.run.name, "units"))
    return Units(config, layout, Cache(folders))


def _peaks(unit: Unit) -> int:
    return sum(unit.peaks.values())


def _single(layer: int, policy: BlockPolicy, recompute: bool) -> Part:
    return Part(
        StageSpec(False, range(layer, layer + 1), False), (BlockSpan(1, policy),), recompute
    )


def has_user_code(config: Config) -> bool:
    """Whether a stage depends on user code, whose files the cache key does not cover."""
    model = config.model
    named = model.moe.score_function, config.experts.dispatch
    given = (model.source, model.norm, config.train.loss_function, config.context.algorithm, *named)
    return any(each is not None and is_user_code(each) for each in given)


def _sorted(span: Any) -> str:
    """Return a text that is equal for equal spans in every process."""
    policy = span.policy
    names = (sorted(policy.recompute), sorted(policy.offload), policy.saves_attention)
    return f"{span.blocks} {names}"


def _others(config: Config, layout: Layout) -> Mapping[str, Any]:
    """Return further entries of the cache key: keys of other sections and sizes of the layout."""
    parallel, train, data = config.parallel, config.train, config.data
    return {
        "data": [data.masks_documents, config.resets_positions, len(data.mixture)],
        "train": [train.sequence_length, train.loss_function],
        "parallel": [parallel.sequence_parallel, parallel.backend, parallel.ranks_per_node],
        "sizes": [layout.tp, layout.cp, layout.ep, layout.etp, layout.ranks_per_node],
        "model": layout.model.fingerprint,
        "replicas": layout.dp if layout.model.experts() else None,
        "lengths": layout.local_lengths,
        "system": config.plan.system,
        "passes on": [layout.sends_tuples, layout.loss_chunk],
    }
