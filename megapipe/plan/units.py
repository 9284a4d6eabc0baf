"""Units of the stages of a layout, from the cache or measured. Torch is loaded to measure only."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.command_line import phase
from megapipe.config.config import Config
from megapipe.distributed.grid import MeshCoordinates
from megapipe.layers.policy import BlockPolicy, BlockSpan
from megapipe.layout.layout import Layout
from megapipe.model.partition import StageSpec
from megapipe.plan.cache import Cache, user_cache
from megapipe.plan.segments import Measured, Part, part_of, shortened, units_of
from megapipe.plan.unit import Operation, Unit
from megapipe.schedule.generators import gpipe_on
from megapipe.util.beneath import make_folder
from megapipe.util.user_code import is_user_code
from megapipe.version import PACKAGE

if TYPE_CHECKING:
    from megapipe.plan.results import Results

SECTIONS = ("model", "lora", "kernels", "experts", "context")
"""Sections of the configuration by which stages differ; of others :func:`_others` has the keys."""


class Units:
    """Costs of a micro-batch at each stage of a layout."""

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
        """Units of a stage, one for each slice of its sequences, on the rank of an `index` along
        cp, by default one that takes most bytes on its device.

        `rows` samples, by default a whole micro-batch. The experts of the rank get `imbalance`
        times the mean rows of a rank.
        """
        if index is None:
            index = self.index_with_most(stage, _peaks)
        key = stage, rows, imbalance, index
        if key not in self._units:
            part = part_of(self.layout, stage)
            self._units[key] = self._measure(part, index, rows, imbalance)
        return self._units[key]

    def index_with_most(self, stage: int, size: Callable[[Unit], float]) -> int:
        """Choose a rank of a ring: the one whose `size` is largest for a single layer, among equals
        one that takes most bytes on its device."""
        part = part_of(self.layout, stage)
        if self.layout.split.ring == 1 or not part.spec.layers:
            return 0
        if size not in self._places:
            own = self._around_ring(part.spec.layers[0], part.spans[0].policy, part.recompute)
            self._places[size] = max(
                own, key=lambda at: (sum(map(size, own[at])), sum(map(_peaks, own[at])))
            )
        return self._places[size]

    def flops(self, stage: int, operation: Operation) -> float:
        """FLOPs of an operation on a whole micro-batch, on the mean rank of a ring."""
        part, found = part_of(self.layout, stage), float(self._flops(self.of(stage), operation))
        if self.layout.split.ring > 1:
            index = self.index_with_most(stage, _peaks)
            policies = (span.policy for span in part.spans for _ in range(span.blocks))
            for layer, policy in zip(part.spec.layers, policies, strict=True):
                around = self._around_ring(layer, policy, part.recompute)
                own = {at: self._flops(units, operation) for at, units in around.items()}
                found += sum(own.values()) / len(own) - own[index]
        return found

    @staticmethod
    def _flops(units: Iterable[Unit], operation: Operation) -> int:
        return sum(unit.flops(operation) for unit in units)

    def _around_ring(
        self, layer: int, policy: BlockPolicy, recompute: bool
    ) -> dict[int, list[Unit]]:
        """Measure a single layer on each rank of a ring, by index along cp."""
        kind = self.layout.model.kind(layer), policy, recompute
        if kind not in self._rings:
            part, split = _single(layer, policy, recompute), self.layout.split
            places = (split.index(i, 0) for i in range(split.ring))
            self._rings[kind] = {at: self._measure(part, at, None, None) for at in places}
        return self._rings[kind]

    def of_layer(self, layer: int, dispatch: str, node: int | None = None) -> Unit:
        """Unit of one layer with experts under a form of ``experts.dispatch``, in one chunk.

        Experts are chosen evenly, sequences are whole, and nothing is recomputed. `node`: ranks of
        a node, where the form is hierarchical.
        """
        key = self.layout.model.kind(layer), dispatch, node
        if key not in self._layers:
            form = {"dispatch": dispatch, "node": node or self.config.experts.node, "chunks": 1}
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
        """Results that all runs share."""
        from megapipe.plan.results import Results

        return Results()

    @cached_property
    def without_recomputation(self) -> Units:
        """Units of the layout with layers that keep all of their activations."""
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
            with phase("running stages without values"):
                from megapipe.plan.run import run_part

                at, part, given = MeshCoordinates(0, 0, index, 0), short.part, self._results
                return run_part(
                    config, layout, part, rows, at=at, imbalance=imbalance, results=given
                )

        if key not in self._measured:
            kept = Cache([]) if _has_user_code(config) else self._cache
            self._measured[key] = kept.get(key, Measured, run)
        return units_of(self._measured[key], short)

    def _key(self, part: Part, rows: int, index: int, imbalance: Fraction | None) -> str:
        everything = {
            **self._shared_key,
            "part": [repr(part.spec), *map(_sorted, part.spans), part.recompute],
            "piece": [rows, index, str(imbalance)],
        }
        text = json.dumps(everything, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def _kinds(self) -> list[Hashable]:
        model = self.layout.model
        return [model.kind(layer) for layer in range(model.layers)]

    @cached_property
    def _shared_key(self) -> Mapping[str, Any]:
        """The share that the keys of all parts have."""
        config, layout = self.config, self.layout
        return {
            "torch": version("torch"),
            "program": _program(),
            "device": layout.device,
            "sections": config.model_dump(mode="json", include=set(SECTIONS)),
            **_others(config, layout),
        }


def units_of_run(config: Config, layout: Layout) -> Units:
    """Make the units of a run, which are in its folder too: `units`."""
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


def _has_user_code(config: Config) -> bool:
    """Whether what a stage does is in files that no key tells of."""
    model = config.model
    named = model.moe.scores, config.experts.dispatch
    given = (model.source, model.norm, config.train.loss, config.context.plan, *named)
    return any(each is not None and is_user_code(each) for each in given)


def _sorted(span: Any) -> str:
    """Text of a span that is the same in every process."""
    policy = span.policy
    names = (sorted(policy.recompute), sorted(policy.offload), policy.keeps_attention)
    return f"{span.blocks} {names}"


def _others(config: Config, layout: Layout) -> Mapping[str, Any]:
    """Keys of other sections, and sizes of the layout, by which stages differ."""
    parallel, train, data = config.parallel, config.train, config.data
    return {
        "data": [data.masks_documents, config.resets_positions, len(data.mixture)],
        "train": [train.sequence_length, train.loss],
        "parallel": [parallel.sequence_parallel, parallel.backend, parallel.per_node],
        "sizes": [layout.tp, layout.cp, layout.ep, layout.etp, layout.ranks_per_node, layout.dp],
        "lengths": layout.local_lengths,
        "passes on": [layout.sends_tuples, layout.loss_chunk],
    }


@cache
def _program() -> str:
    """Text that is another one where a file of the package is."""
    files = ((path, path.stat()) for path in sorted(PACKAGE.rglob("*.py")))
    return str([(str(path.relative_to(PACKAGE)), s.st_size, s.st_mtime_ns) for path, s in files])
