"""Memory of a stage run on the meta device, held to the byte against gloo processes.

The processes run the same stage with values, and finalisers count every storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import MeshCoordinates
from megapipe.engine.stage import Stage
from megapipe.experts.map import ExpertMap
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.scratch import Scratch
from megapipe.layout.layout import Layout
from megapipe.model.interface import Message
from megapipe.ops.documents import Documents
from megapipe.ops.live_storages import LiveStorages
from megapipe.plan.run import measure
from megapipe.plan.unit import Unit
from megapipe.testing import World, run_world
from tests.parity.cases import END, Case
from tests.parity.forced_routing import evenly
from tests.parity.live_storages import known_of, settle
from tests.parity.planned_stages import CASES, Stages
from tests.parity.tiers import in_parts, one_of

Bytes = Mapping[str, int]
"""Bytes held, on the host and queued, and the most within each operation."""
TIMES = 10
"""Number of measurements at most: gloo's threads may free what they have sent a moment late."""
CLASS_CASES = [
    Case(pp=2, in_process=True),
    Case(pp=2, in_process=True, activations="full"),
    Case(pp=2, tp=2, in_process=True),
    Case(pp=2, cp=2, documents=True, in_process=True),
]
"""Layouts of transformers classes; all stages are looked at."""
SPLIT_EXPERTS = Case(pp=2, dp=2, ep=2, moe="top 2", in_process=True)
NUMBER = 8
"""Bytes of a Python number, of which torch makes a tensor for a moment on one device only."""


@one_of(2)
def test_run_on_the_meta_device_takes_the_bytes_of_processes(some: slice) -> None:
    """Ranks that have a stage may differ; the one that takes most is compared."""
    assert not (wrong := compare(CASES[some])), "(planned, measured):\n" + "\n".join(wrong)


@in_parts("family", ["llama", "mixtral"], default=[], full=["mixtral"])
def test_run_of_a_transformers_class_takes_the_bytes_of_processes(
    family: str, tmp_path: Path
) -> None:
    from tests.parity.class_models import ClassStages, make_class

    make_class(family).save_pretrained(tmp_path)
    every = [*CLASS_CASES, *([SPLIT_EXPERTS] if family == "mixtral" else [])]
    cases = [ClassStages(tmp_path, case) for case in every]
    cases.append(ClassStages(tmp_path, CLASS_CASES[1], adapts=True))
    wrong = compare(cases, measure_classes, share=0.01)
    assert not wrong, "(planned, measured):\n" + "\n".join(wrong)


def compare(
    cases: Sequence[Any], measuring: Callable[..., Any] | None = None, share: float = 0.0
) -> list[str]:
    """Describe all that differs.

    `cases`: objects like :class:`Stages`. `measuring`: a function like :func:`measure_processes`.
    `share`: difference that is allowed, as a share of the measured bytes.
    """
    by_world = sorted(cases, key=lambda each: each.case.world)
    wrong = []
    for world, group in itertools.groupby(by_world, key=lambda each: each.case.world):
        planned = [(each, _plan_all(each)) for each in group]
        of_ranks = run_world(world, measuring or measure_processes, planned, timeout_s=240)
        for i, (each, of_stages) in enumerate(planned):
            for number, expected in of_stages.items():
                measured = _most(ranks[i][number] for ranks in of_ranks)
                for j, (a, b) in enumerate(zip(expected, measured, strict=True)):
                    off = {
                        k: (a[k], b[k]) for k in b if abs(a[k] - b[k]) > max(NUMBER, share * b[k])
                    }
                    if off:
                        wrong.append(f"{each.name} stage {number} slice {j}: {off}")
    return wrong


def _plan_all(given: Stages) -> dict[int, list[Bytes]]:
    """Plan the bytes of each slice, by stage."""
    return {n: [_sizes(unit) for unit in _plan(given, n)] for n in given.stages}


def _plan(given: Stages, number: int) -> list[Unit]:
    """Plan the units of a stage on the rank of cp that takes most."""
    config, layout = given.configure()
    places = [MeshCoordinates(0, 0, index, 0) for index in range(layout.cp)]
    even = Fraction(1)
    ranks = [
        measure(config, layout, number, rows=given.rows, at=at, imbalance=even) for at in places
    ]
    return [_largest(units) for units in zip(*ranks, strict=True)]


def _largest(units: Sequence[Unit]) -> Unit:
    peaks = {what: max(unit.peaks[what] for unit in units) for what in units[0].peaks}
    sizes = {name: max(getattr(unit, name) for unit in units) for name in ("held", "queued")}
    return units[0].model_copy(update={"peaks": peaks, **sizes})


def _sizes(unit: Unit) -> Bytes:
    cached = {f"cached after {what}": size for what, size in zip("FI", unit.cached, strict=True)}
    peaks = {what: unit.peak(what, rebuilt=what == "I") for what in unit.peaks}
    return {**cached, "held": unit.held, "host": unit.host, "queued": unit.queued, **peaks}


def _most(ranks: Iterator[list[Bytes]]) -> list[Bytes]:
    by_slice = zip(*ranks, strict=True)
    return [{what: max(each[what] for each in given) for what in given[0]} for given in by_slice]


def measure_processes(
    world: World, planned: Sequence[tuple[Stages, Mapping[int, list[Bytes]]]]
) -> list[dict[int, list[Bytes]]]:
    """Return the bytes of each slice on this rank, by case and stage: the least of several
    measurements, which end once it is what is planned or less."""
    found = []
    with evenly(), to_owners():
        for given, of_stages in planned:
            config, layout = given.configure()
            step = TrainStep(config, layout, world.mesh(given.case.grid), document_end=END)
            for places in step.maps.replicas.values():
                places.set_map(places.map.filled())
            of_case = {}
            for number, expected in of_stages.items():
                real = _Real(given, config, layout, step, number)
                real.walk()  # makes what stays, such as tables of positions
                least = real.walk()
                for _ in range(TIMES - 1):
                    both = zip(least, expected, strict=True)
                    if not step.mesh.any(any(a[k] > b[k] + NUMBER for a, b in both for k in a)):
                        break
                    pairs = zip(least, real.walk(), strict=True)
                    least = [{k: min(a[k], b[k]) for k in a} for a, b in pairs]
                of_case[number] = least
            found.append(of_case)
    return found


def measure_classes(world: World, planned: Any) -> Any:
    """Do as :func:`measure_processes`; experts get equally many rows."""
    from tests.parity.class_models import measure_evenly

    return measure_evenly(measure_processes, world, planned)


@contextmanager
def to_owners() -> Iterator[None]:
    """Send rows to the owners of their experts, and none to replicas."""
    with mock.patch.object(ExpertMap, "holders", lambda of, expert: [of.owners[expert]]):
        yield


class _Real:
    """A stage of a process."""

    def __init__(
        self, given: Stages, config: Config, layout: Layout, step: TrainStep, number: int
    ) -> None:
        self.case, self.config, self.layout, self.number = given.case, config, layout, number
        self.rows = given.rows or self.case.batch
        self.stage: Stage = step.stages[number]
        self.cp = step.mesh.cp.index

    def walk(self) -> list[Bytes]:
        """Run all operations of a micro-batch: F, R, I and W, and once more F and B."""
        lengths, found = self.layout.local_lengths, list[dict[str, int]]()
        inputs = [[self._message(side, n) for n in lengths] for side in ("F", "I")]
        given = [tensor for side in inputs for each in side for tensor in each]
        self.stage.begin(train=True)
        live = LiveStorages(known_of(self.stage, *given))
        for fused in (False, True):
            mbs = list(self._microbatches())
            live.know(value for mb in mbs for value in vars(mb).values() if torch.is_tensor(value))
            self.stage.begin(train=True)
            live.peak = live.bytes
            self._pass(live, mbs, inputs, found, fused=fused)
        return [self._without_rest(one) for one in found]

    def _pass(
        self,
        live: LiveStorages,
        mbs: Sequence[MicroBatch],
        inputs: Sequence[Sequence[Sequence[Tensor]]],
        found: list[dict[str, int]],
        *,
        fused: bool,
    ) -> None:
        stage, held = self.stage, []

        def peak(one: dict[str, int], what: str, rest: int) -> None:
            settle(0.005)
            one[what], live.peak = live.peak - rest, live.bytes

        for j, mb in enumerate(mbs):
            if not fused:
                found.append({})
            before = live.bytes - stage.cached_bytes()
            with live:
                y = stage.forward((0, j), _copy(inputs[0][j]), mb)
                del y
            found[j]["cached after F"] = cached = stage.cached_bytes()
            peak(found[j], "F", before + cached)
            held.append(live.bytes - before - cached)
            found[j]["host"] = sum(live.host_sizes)
        for j in reversed(range(len(mbs))):
            one, rest = found[j], live.bytes - held[j]
            if stage.recomputes and not fused:
                with live:
                    stage.recompute((0, j))
                peak(one, "R", rest)
            if not fused:
                one["held"] = live.bytes - rest
            with live:
                of = stage.backward if fused else stage.input_grad
                x = of((0, j), _copy(inputs[1][j]))
                del x
            peak(one, "B" if fused else "I", rest)
            rest += stage.cached_bytes() - cached
            one["cached after I"] = cached = stage.cached_bytes()
            if not fused:
                one["queued"] = live.bytes - rest
                with live:
                    stage.weight_grad((0, j))
                peak(one, "W", rest)
                one["rest"] = live.bytes - rest

    @staticmethod
    def _without_rest(one: dict[str, int]) -> Bytes:
        """Without what lasts until the step ends: figures of routing, losses."""
        rest = one.pop("rest")
        apart = ("host", "cached after F", "cached after I")
        return {what: size - rest * (what not in apart) for what, size in one.items()}

    def _message(self, operation: str, length: int) -> list[Tensor]:
        """Make the message that an operation takes."""
        stage = self.number - (operation == "F")
        if not 0 <= stage < self.layout.stages - 1:
            return []
        spec = self.layout.stage_layers[stage]
        tensors = self.layout.model.output_shape(spec, self.rows, length)
        return [
            torch.full(each.shape, 0.1, dtype=getattr(torch, each.dtype))
            for each in tensors
            if each.has_grad or operation == "F"
        ]

    def _microbatches(self) -> Iterator[MicroBatch]:
        layout, start = self.layout, 0
        lengths = layout.local_lengths
        held = None if layout.cp == 1 else layout.split.local(layout.slice_lengths, self.cp)
        more: dict[str, Any] = {"local_positions": held, "scale": 0.1}
        if len(lengths) > 1:
            more |= {"sequence_length": sum(lengths), "sequence_scratch": Scratch()}
        for length in lengths:
            ids = torch.arange(self.rows * length).view(-1, length) % self.case.vocab
            documents = None
            if self.case.documents:  # of all ranks that have parts of a sequence
                whole = torch.zeros(len(ids), (start + length) * layout.cp, dtype=torch.int64)
                documents = Documents(whole, ids.device)
            if self.config.resets_positions:
                more["positions"] = ids.t() % layout.local_length
            mask = torch.ones_like(ids, dtype=torch.bool)
            if sources := len(self.config.data.mixture):
                mask, more["by_source"] = mask.byte(), torch.zeros(sources, dtype=torch.float64)
            yield MicroBatch(
                index=0,
                step=0,
                seed=1,
                tokens=ids,
                labels=ids,
                mask=mask,
                start=start,
                documents=documents,
                **more,
            )
            start += length


def _copy(message: Sequence[Tensor]) -> Message:
    """Copy a message, so that it belongs to the operation that takes it."""
    copies = tuple(each.clone() for each in message)
    return copies if len(copies) > 1 else next(iter(copies), None)
