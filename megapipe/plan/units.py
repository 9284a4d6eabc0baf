"""Units of the stages of a layout, from the cache or measured. Torch is loaded to measure only."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megapipe
from megapipe.beneath import make_folder
from megapipe.command_line import phase
from megapipe.config import Config
from megapipe.distributed.grid import Coordinates
from megapipe.layers.policy import BlockPolicy, Span
from megapipe.layout.layout import Layout
from megapipe.plan.cache import Cache, user_cache
from megapipe.plan.segments import Measured, Part, shortened, units_of
from megapipe.plan.unit import Unit
from megapipe.user_code import is_user_code

SECTIONS = ("model", "lora", "kernels", "experts", "context")
"""Sections of the configuration by which stages differ; of others :func:`_others` has the keys."""


class Units:
    """Costs of a micro-batch at each stage of a layout."""

    def __init__(self, config: Config, layout: Layout, cache: Cache | None = None) -> None:
        self.config, self.layout = config, layout
        self._cache = cache or Cache()
        self._measured: dict[str, Measured] = {}
        self._units: dict[tuple[int, int | None, Fraction | None, int], list[Unit]] = {}
        self._places: dict[Callable[[Unit], float], int] = {}

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
        split, part = self.layout.split, part_of(self.layout, stage)
        if split.ring == 1 or not part.spec.layers:
            return 0
        if size not in self._places:
            one = part._replace(
                spec=type(part.spec)(False, part.spec.layers[:1], False),
                spans=[part.spans[0]._replace(blocks=1)],
            )
            places = [split.index(i, 0) for i in range(split.ring)]
            units = {at: self._measure(one, at, None, None) for at in places}
            self._places[size] = max(
                places, key=lambda at: (sum(map(size, units[at])), sum(map(_peaks, units[at])))
            )
        return self._places[size]

    @cached_property
    def without_recomputation(self) -> Units:
        """Units of the layout with layers that keep all of their activations."""
        spans = self.layout.spans
        if not any(span.policy.recompute for own in spans for span in own):
            return self
        kept = [
            [Span(sum(span.blocks for span in own), BlockPolicy())] * bool(own) for own in spans
        ]
        layout = replace(self.layout, spans=tuple(map(tuple, kept)))
        return Units(self.config, layout, self._cache)

    def _measure(
        self, part: Part, index: int, rows: int | None, imbalance: Fraction | None
    ) -> list[Unit]:
        config, layout = self.config, self.layout
        kinds = [layout.model.kind(layer) for layer in range(layout.model.layers)]
        short = shortened(part, kinds)
        rows = rows or config.train.microbatch
        key = _key(config, layout, short.part, rows, index, imbalance)

        def run() -> Measured:
            with phase("running stages without values"):
                from megapipe.plan.run import run_part

                at = Coordinates(0, 0, index, 0)
                return run_part(config, layout, short.part, rows, at=at, imbalance=imbalance)

        if key not in self._measured:
            kept = Cache([]) if _has_user_code(config) else self._cache
            self._measured[key] = kept.get(key, Measured, run)
        return units_of(self._measured[key], short)


def units_of_run(config: Config, layout: Layout) -> Units:
    """Make the units of a run, which are in its folder too: `units`."""
    folders = [user_cache()]
    with contextlib.suppress(OSError):
        folders.insert(0, make_folder(Path(config.run.folder) / config.run.name, "units"))
    return Units(config, layout, Cache(folders))


def _peaks(unit: Unit) -> int:
    return sum(unit.peaks.values())


def part_of(layout: Layout, stage: int) -> Part:
    """Return the units of the model that a stage of a layout has."""
    spec, spans = layout.stage_layers[stage], layout.spans[stage]
    return Part(spec, spans, stage in layout.schedule.recompute)


def _has_user_code(config: Config) -> bool:
    """Whether what a stage does is in files that no key tells of."""
    model = config.model
    given = (model.source, model.norm, config.train.loss, config.context.plan)
    return any(each is not None and is_user_code(each) for each in given)


def _key(
    config: Config,
    layout: Layout,
    part: Part,
    rows: int,
    index: int,
    imbalance: Fraction | None,
) -> str:
    everything = {
        "torch": version("torch"),
        "program": _program(),
        "device": layout.device,
        "sections": config.model_dump(mode="json", include=set(SECTIONS)),
        **_others(config, layout),
        "part": [repr(part.spec), *map(_sorted, part.spans), part.recompute],
        "piece": [rows, index, str(imbalance)],
    }
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
        "sizes": [layout.tp, layout.cp, layout.ep, layout.etp, layout.node, layout.dp],
        "lengths": layout.local_lengths,
        "passes on": [layout.sends_tuples, layout.loss_chunk],
    }


@cache
def _program() -> str:
    """Text that is another one where a file of the package is."""
    root = Path(megapipe.__file__).parent
    files = ((path, path.stat()) for path in sorted(root.rglob("*.py")))
    return str([(str(path.relative_to(root)), s.st_size, s.st_mtime_ns) for path, s in files])
