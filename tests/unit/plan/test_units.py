"""Measured units: kept on disk by all that they depend on, and of few layers where many are equal.

That a warm cache needs no torch at all is tried out in `tests/dist/test_imports.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.section import Section
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan import cache
from megapipe.plan.cache import Cache
from megapipe.plan.run import measure
from megapipe.plan.unit import OPERATIONS, Unit
from megapipe.plan.units import SECTIONS, Units, part_of
from tests.parity.cases import Case, configure
from tests.parity.planned_stages import CASES
from tests.parity.tiers import in_parts

SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "train.sequence_length=16",
    "train.microbatch=2",
    "train.global_batch=2",
    "parallel.device=cpu",
)


def planned(folder: Path, *keys: str) -> list[Unit]:
    config, layout = resolve(parse([*SMALL, *keys]).config, None, None)
    return Units(config, layout, Cache([folder])).of(0)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have all later measurements fail."""
    return lambda: monkeypatch.setitem(sys.modules, "megapipe.plan.run", None)


def test_what_was_measured_before_is_read(tmp_path: Path, unmeasured: Callable[[], None]) -> None:
    first = planned(tmp_path)
    unmeasured()
    assert planned(tmp_path) == first
    with pytest.raises(ImportError):
        planned(tmp_path, "model.hidden=32")


@pytest.mark.parametrize("text", ["", '{"slices": [', '{"slices": [{"passes": 1}]}', "[]", "\xff"])
def test_a_damaged_file_is_measured_anew(
    text: str, tmp_path: Path, unmeasured: Callable[[], None]
) -> None:
    first = planned(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text, encoding="latin-1")
    assert planned(tmp_path) == first
    unmeasured()
    assert planned(tmp_path) == first, "it has been written again"


def test_a_folder_that_cannot_be_written_to_costs_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert planned(tmp_path / "file" / "units") == planned(tmp_path / "other")


class Number(BaseModel):
    value: int


def test_two_write_at_once(tmp_path: Path) -> None:
    """Each has found nothing before the other wrote."""

    def make(value: int) -> Number:
        if value:
            Cache([tmp_path]).get("key", Number, lambda: make(value - 1))
        return Number(value=value)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Cache([tmp_path]).get("key", Number, lambda: make(3)), [0]))
        found += pool.map(
            lambda n: Cache([tmp_path]).get(f"key {n % 2}", Number, lambda: Number(value=7)),
            range(100),
        )
    assert found == [Number(value=3), *[Number(value=7)] * 100]
    assert files_of(tmp_path) == ["key 0.json", "key 1.json", "key.json"]
    assert Number.model_validate_json((tmp_path / "key.json").read_bytes()).value == 3


def test_the_older_half_of_too_many_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST", 5)
    for i in range(6):
        Cache([tmp_path]).get(str(i), Number, lambda: Number(value=1))
        if i < 5:
            os.utime(tmp_path / f"{i}.json", (i, i))
    assert files_of(tmp_path) == ["3.json", "4.json", "5.json"]


KEYS = [
    ("model.dropout=0.1",),
    ("lora.rank=2",),
    ("kernels.loss_chunk_tokens=8",),
    ("train.sequence_length=32",),
    ("train.microbatch=1",),
    ("data.document_mask=true",),
    ("data.document_mask=true", "data.reset_position_ids=true"),
    ("data.mixture.a.source=a", "data.mixture.b.source=b"),
    ("activations.policy=full",),
    ("parallel.device=cuda",),
    ("parallel.tp=2",),
    ("parallel.tp=2", "parallel.sequence_parallel=true"),
]


def test_each_has_a_file_of_its_own(tmp_path: Path) -> None:
    found = [planned(tmp_path)]
    for n, keys in enumerate(KEYS, 2):
        found.append(planned(tmp_path, *keys))
        assert len(files_of(tmp_path)) == n, keys
    assert [planned(tmp_path, *keys) for keys in [(), *KEYS]] == found
    assert len(files_of(tmp_path)) == len(found)


def test_keys_that_stages_do_not_depend_on_share_files(tmp_path: Path) -> None:
    one = planned(tmp_path)
    others = ("optimizer.lr=1e-2", "run.seed=3", "train.global_batch=8", "log.every=3")
    assert planned(tmp_path, *others) == one
    assert len(files_of(tmp_path)) == 1


def test_another_torch_or_program_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, package = tmp_path / "units", tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/a.py"):
        (package / name).write_text("x = 1\n")

    def number() -> int:
        cache._program.cache_clear()
        planned(folder)
        return len(files_of(folder))

    assert number() == 1
    monkeypatch.setattr(cache, "PACKAGE", package)
    assert [number(), number()] == [2, 2]
    (package / "inner" / "a.py").write_text("x = 12\n")
    assert number() == 3
    os.utime(package / "inner" / "a.py", ns=(1, 1))
    assert number() == 4, "an edit that leaves the size"
    (package / "inner" / "b.py").touch()
    assert number() == 5
    monkeypatch.setattr(cache, "version", lambda _: "9.9.9")
    assert [number(), number()] == [6, 6]
    cache._program.cache_clear()


def test_what_depends_on_user_defined_code_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(logits: Any, labels: Any, mask: Any) -> Any:
        return logits.sum()

    module = ModuleType("written_here")
    module.__dict__.update(loss=loss)
    monkeypatch.setitem(sys.modules, "written_here", module)
    loss_alone = parse([*SMALL, "train.loss_function=written_here:loss"]).config
    tiny = ("model.options.width=4", "model.options.depth=2", "train.global_batch=4")
    model = parse(["model.source=tests.parity.tiny_family:Tiny", *tiny]).config
    for config in (loss_alone, model):
        assert Units(*resolve(config, None, 257), Cache([tmp_path / "units"])).of(0)
        assert not (tmp_path / "units").exists()


Read = tuple[str, str]
"""A section's class and a field."""
OF_LAYOUT = {
    *(("ParallelConfig", name) for name in ("tp", "cp", "ep", "etp", "dp")),  # sizes
    ("TrainConfig", "microbatch"),  # rows
}
"""Fields that are in the key by other names."""
OF_UPDATES = {("OptimizerConfig", "rule")}
"""Fields by which a GPU's kernels are listed, but not chosen."""


@contextmanager
def reading() -> Iterator[set[Read]]:
    """Note the fields of sections that are read."""
    seen: set[Read] = set()
    plain = Section.__getattribute__

    def noting(section: Section, name: str) -> Any:
        value = plain(section, name)
        if name in type(section).model_fields and not isinstance(value, Section):
            seen.add((type(section).__name__, name))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", noting)
        yield seen


def in_whole(section: Section) -> Iterator[str]:
    """Yield the classes of a section and of the sections in it; the key has all their fields."""
    yield type(section).__name__
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from in_whole(value)


def on_a_gpu(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*SMALL, "parallel.device=cuda", *keys]).config, None, None)


def of_all_kinds() -> Iterator[tuple[Config, Layout, int]]:
    """Yield configurations of stages that differ in many ways, and a stage of each."""
    for case in CASES[::9]:
        yield (*case.configure(), case.stages[-1])
    for case in CASES:
        if case.keys or case.case.placement != "static" or case.case.codec != "none":
            yield (*case.configure(), case.stages[-1])
    yield (*on_a_gpu("model.dtype=bf16", "data.document_mask=true"), 0)
    yield (*on_a_gpu("model.dtype=bf16", "kernels.compile=true", "model.moe.num_experts=4"), 0)
    yield (*on_a_gpu("model.dtype=bf16", "parallel.cp=2", "model.positions=rotary"), 0)


def test_all_that_a_measurement_reads_is_in_its_key() -> None:
    missing: set[Read] = set()
    for config, layout, stage in of_all_kinds():
        whole = {name for section in SECTIONS for name in in_whole(getattr(config, section))}
        with reading() as seen:
            measure(config, layout, stage)
        with reading() as known:
            Units(config, layout)._key(part_of(layout, stage), 1, 0, None)
        assert seen
        missing |= {each for each in seen - known if each[0] not in whole}
    assert missing <= OF_LAYOUT | OF_UPDATES


BASE = Case(pp=2, in_process=True, layers=16, model="llama", kv_heads=2, dtype="fp32")
MOE = replace(BASE, tp=2, ep=2, sequence_parallel=True)
Given = tuple[Case, dict[str, dict[str, Any]]]
MANY_LAYERS: dict[str, Given] = {
    "plain": (BASE, {}),
    "recomputed two together": (replace(BASE, activations="full, two together"), {}),
    "recomputed as a whole": (replace(BASE, activations="stage"), {}),
    "windows and full": (
        replace(BASE, model="gpt2", kv_heads=None),
        {"model": {"sliding_window": 4, "full_attention_every": 2}},
    ),
    "dense, then experts": (
        replace(MOE, moe="top 2"),
        {"model": {"moe": {"first_dense_layers": 3}}},
    ),
    "every second": (replace(MOE, moe="top 2"), {"model": {"moe": {"layer_freq": 2}}}),
    "slices": (replace(BASE, schedule="seq1f1b", slices=2), {}),
    "offload": (replace(BASE, activations="offload", dropout=0.1), {}),
    "adapters": (replace(BASE, lora="some"), {}),
    "a ring": (replace(BASE, cp=2, dtype="bf16"), {}),
}


def merged(tree: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(tree[k], v) if isinstance(v, dict) else v for k, v in keys.items()}
    return {**tree, **both}


@in_parts("name", MANY_LAYERS, default=4, full=2)
def test_few_layers_tell_what_many_do(name: str) -> None:
    """Every size, and every call in its order."""
    case, keys = MANY_LAYERS[name]
    config, layout = configure(case)
    if keys:
        tree = merged(config.model_dump(), keys)
        config, layout = resolve(Config.model_validate(tree), case.world, case.vocab)
    for stage in range(layout.stages):
        assert len(layout.stage_layers[stage].layers) >= 6
        whole = measure(config, layout, stage, shorten=False)
        assert measure(config, layout, stage) == whole
        for unit in whole:
            assert unit.held + unit.host > 0
            assert unit.operations["I"]


def test_flops_are_those_of_the_mean_rank_of_a_ring(tmp_path: Path) -> None:
    """The first rank of three has the first positions, whose queries see few keys."""
    keys = ("parallel.cp=3", "context.position_split=contiguous", "train.sequence_length=24")
    config, layout = resolve(parse([*SMALL, *keys]).config, None, None)
    measured = Units(config, layout, Cache([tmp_path]))
    for operation in OPERATIONS.values():
        own = [measured.of(0, index=i)[0].flops(operation) for i in range(3)]
        assert measured.flops(0, operation) == sum(own) / 3
        assert len({*own}) == (3 if operation in "FIB" else 1)
