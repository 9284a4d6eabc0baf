"""The logic of the GPU benchmarks, on the CPU: searches, budgets, rates and projections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import loop, vee
from tests.parity.ladder import load_ladder, toy_work

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_ladder(monkeypatch)


@pytest.fixture
def mesh(ladder: Any) -> Iterator[Any]:
    yield ladder.sides.single_mesh(CPU)
    dist.destroy_process_group()


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 40, 63, 64, 100])
@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_search_finds_the_limit_to_within_an_eighth(
    ladder: Any, limit: int, start: int
) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        assert n not in tried
        tried.append(n)
        return n <= limit

    found = ladder.memory.largest(fits, start=start, most=64)
    limit = min(limit, 64)
    assert limit - max(1, limit // 8) < found <= limit or found == limit
    assert max(tried) <= 64


def test_a_search_in_a_hurry_takes_what_it_has(ladder: Any) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= 2

    assert ladder.memory.largest(fits, start=8, most=64, hurry=lambda: True) == 2
    assert tried == [8, 4, 2]


def test_only_a_lack_of_memory_is_caught(ladder: Any) -> None:
    def fail(error: Exception) -> None:
        raise error

    fits = ladder.memory.fits
    assert fits(lambda: None)
    assert not fits(lambda: fail(torch.OutOfMemoryError("no")))
    assert not fits(lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")))
    with pytest.raises(RuntimeError, match="shape"):
        fits(lambda: fail(RuntimeError("shape")))


def test_fewer_rows_than_configured_are_a_micro_batch_too(ladder: Any, mesh: Any) -> None:
    """The loss is that of a step configured for them, before and after memory ran out."""
    toy = ladder.sizes.TOY
    plain = ladder.sides.Ours(toy, mesh, 3)
    expected = [plain.step() for _ in range(2)]
    side = ladder.sides.Ours(toy, mesh, toy.most)
    block = next(iter(side.train.modules.values())).layers
    calls = 0

    def give_out(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("the second micro-batch")

    hook = block.register_forward_hook(give_out)
    assert not ladder.memory.fits(side.step)
    hook.remove()
    side.rows = 3
    assert [side.step() for _ in range(2)] == expected


@pytest.mark.slow
def test_both_sides_learn(ladder: Any, mesh: Any) -> None:
    size = replace(ladder.sizes.TOY, family={**ladder.sizes.LLAMA, "vocab_size": 50})
    sides = [
        ladder.sides.Ours(size, mesh, 4),
        ladder.sides.HuggingFace(size, CPU, "fp32", compile=False),
        ladder.sides.HuggingFace(size, CPU, "mixed", compile=False),
        ladder.sides.HuggingFace(size, CPU, "bf16", compile=False),
    ]
    for side in sides:
        side.rows = 4
        losses = [side.step() for _ in range(4)]
        assert losses[0] == pytest.approx(torch.tensor(50.0).log().item(), abs=1.0)
        assert losses[-1] < losses[0]


def test_masters_are_what_the_mixed_peer_updates(ladder: Any) -> None:
    """A step too small for bf16 shows in the masters, which the weights follow."""
    side = ladder.sides.HuggingFace(ladder.sizes.TOY, CPU, "mixed", compile=False)
    before = [master.clone() for master in side.masters]
    side.optimizer.param_groups[0]["lr"] = 1e-7
    side.step()
    for weight, master, old in zip(side.weights, side.masters, before, strict=True):
        assert weight.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert not master.equal(old)
        assert weight.equal(master.bfloat16())


def test_quick_weights_are_used_and_padding_is_zero(ladder: Any, mesh: Any) -> None:
    toy = ladder.sizes.TOY
    side = ladder.sides.Ours(toy, mesh, 1)
    weights = {own.spec.name: own for own in side.train.optimizer.own_slices()}
    embedding = weights["embedding.word.weight"]
    values = embedding.values["model"].view(embedding.spec.sizes)
    vocabulary = toy.family["vocab_size"]
    assert values.shape[0] > vocabulary
    assert not values[vocabulary:].any()
    drawn = torch.empty_like(values)
    embedding.spec.initialise(drawn, 1234)
    quick = values[:vocabulary]
    assert quick.std() == pytest.approx(0.02, rel=0.1)
    assert not quick.equal(drawn[:vocabulary])
    pool = ladder.sides.QuickWeights().pool[: 1 << 16] * 0.02
    assert torch.isin(quick, pool).all()


def test_quick_weights_go_round(ladder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder.sides, "POOL", 7)
    weights = ladder.sides.QuickWeights()
    spec = SimpleNamespace(std=2.0, shape=(3, 3))
    first, second = torch.empty(4, 3), torch.empty(3, 3)
    weights(spec, first)
    weights(spec, second)
    numbers = torch.cat([weights.pool, weights.pool, weights.pool]) * 2.0
    assert first[:3].flatten().equal(numbers[:9])
    assert not first[3].any()
    assert second.flatten().equal(numbers[12:21])
    weights(SimpleNamespace(std=None, fill=1.0), second)
    assert second.eq(1.0).all()


def test_model_flops_are_the_formula(ladder: Any) -> None:
    for size in ladder.sizes.LADDER:
        n, model = size.matmul_parameters, size.model
        formula = 6 * n + 12 * model.layers * model.heads * model.head_dim * size.sequence
        assert size.flops == formula
    counts = [size.matmul_parameters / 1e6 for size in ladder.sizes.LADDER]
    assert counts == pytest.approx([123.5, 353.5, 1310.9, 6607.1], rel=1e-3)


def row(ladder: Any, side: str, seconds: float, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "size": "1.3B",
        "side": side,
        "setting": "defaults",
        "state": "bf16",
        "rows": 4,
        "tokens": 8192,
        "times": [seconds, 9.0, seconds / 2],
        "peak": 2**30,
        "loss": 1.0,
        **changes,
    }
    return ladder.records.Row(**values)


def test_claims_are_worked_out_from_the_records(ladder: Any, tmp_path: Path) -> None:
    records = [
        ladder.records.Calibration("1.3B", 700.0, 4000.0, {"flash": 1.0, "cudnn": None}, 8192),
        row(ladder, "megapipe", 0.2),
        row(ladder, "megapipe", 0.16, setting="kernels.compile=True"),
        row(ladder, "Hugging Face", 0.25),
        ladder.records.Ablation("1.3B", "pipeline.schedule=zb_h1", 2, 1.02, 1.0),
        ladder.records.Ablation("1.3B", "kernels.loss_chunk_tokens=0", 2, 1.2, 1.0),
        ladder.records.Split("1.3B", 4, 1.05),
        ladder.records.Missing("7B: megapipe", "no time"),
    ]
    notebook = ladder.records.Notebook(tmp_path / "records")
    for record in records:
        notebook.add(record)
    with notebook.file.open("a") as out:
        out.write('{"kind": "Row", "size"')
    assert ladder.records.read(notebook.file) == records
    report = ladder.report.Report(records, 989.4)
    size = ladder.sizes.size_of("1.3B")
    mfu = 100 * 8192 / 0.16 * size.flops / 989.4e12
    values = [(result.value, result.met) for result in report.results()]
    expected = [(mfu, mfu >= 50), (0.25 / 0.16, True), (1.02, True), (1.05, False)]
    assert [met for _, met in values] == [met for _, met in expected]
    assert [v for v, _ in values] == pytest.approx([v for v, _ in expected])
    text = ladder.tables.document("T", [("date", "today")], report.results(), report.tables())
    for part in ("| 7B: megapipe | no time |", f"{mfu:.1f}", "| 1.3B | 700 | 4000 | 1 | - |"):
        assert part in text


@pytest.fixture
def work(ladder: Any, tmp_path: Path) -> Any:
    return toy_work(ladder, tmp_path)


def test_time_is_shared_out_and_what_does_not_fit_is_named(
    ladder: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def run_worker(work: Any, timeout_s: float) -> str | None:
        given.append((work.job, work.size, work.until - time.time(), work.rows))
        if work.job == "ours":
            ladder.records.Notebook(Path(work.file)).add(
                row(ladder, "megapipe", 1.0, size=work.size, rows=9)
            )
            return None
        return "its process ended with exit code -9"

    monkeypatch.setattr(ladder.jobs, "run_worker", run_worker)
    sizes = ladder.sizes.LADDER[:2]
    jobs = ladder.jobs.plan(sizes, ["ours", "peer", "ablations"], sizes[1], work)
    records = ladder.jobs.run_all(jobs, 1000.0)
    weights = [0.8, 0.9, 0.56, 0.63, 0.8]
    shares = [1000 * w / sum(weights[i:]) for i, w in enumerate(weights)]  # none uses its share
    names = [("ours", "124M"), ("ours", "350M"), ("peer", "124M"), ("peer", "350M")]
    assert [each[:2] for each in given] == [*names, ("ablations", "350M")]
    assert [each[2] for each in given] == pytest.approx(shares, abs=2.0)
    assert given[-1][3] == 2, "a quarter of the largest micro-batch"
    missing = [r for r in records if isinstance(r, ladder.records.Missing)]
    assert [r.what.partition(":")[0] for r in missing] == ["124M", "350M", "350M"]
    assert all("exit code -9" in r.why for r in missing)
    given.clear()
    records = ladder.jobs.run_all(jobs, 60.0)
    assert given[-1][0] != "ours", "what jobs leave over goes to the next"
    Path(work.file).write_text("")
    records = ladder.jobs.run_all(jobs[-1:], 60.0)
    assert [r.why for r in records] == ["its largest micro-batch was not found"]


@pytest.mark.slow
def test_state_that_does_not_fit_is_made_smaller_then_the_step_is_compiled(
    ladder: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 state does not fit at all, with bf16 state three rows do; another key for compiling."""
    step = ladder.sides.Ours.step

    def limited(side: Any, **options: Any) -> float:
        if "fp32 state" in side.state or side.rows > 3:
            raise torch.OutOfMemoryError("too much")
        return step(side, **options)

    monkeypatch.setattr(ladder.sides.Ours, "step", limited)
    monkeypatch.setattr(ladder.whole_steps, "COMPILE", {"kernels": {"loss_chunk_tokens": 0}})
    monkeypatch.setattr(ladder.whole_steps, "has_key", lambda *_: True)
    bench = ladder.bench.Bench(replace(work, compile=True, until=time.time() + 60))
    try:
        ladder.whole_steps.ours(bench)
    finally:
        dist.destroy_process_group()
    _, *rows = ladder.records.read(Path(work.file))
    setting = "optimizer.state_dtype=bf16 optimizer.rounding=nearest"
    assert [row.setting for row in rows] == [setting, f"{setting} kernels.loss_chunk_tokens=0"]
    assert {row.rows for row in rows} == {3}
    assert {row.state for row in rows} == {"fp32 weights, bf16 state"}
    assert {row.tokens for row in rows} == {2 * 3 * 16}


@pytest.mark.slow
def test_a_peer_that_cannot_be_compiled_is_timed_as_it_is(
    ladder: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(ladder.sides, "compile_parts", refuse)
    bench = ladder.bench.Bench(replace(work, compile=True, until=time.time() + 60))
    try:
        ladder.whole_steps.peer(bench)
    finally:
        dist.destroy_process_group()
    missing, timed = ladder.records.read(Path(work.file))
    assert missing == ladder.records.Missing("toy: Hugging Face compiled", "no compiler")
    assert (timed.setting, timed.rows) == ("not compiled", 4)


def test_changes_without_effect_are_left_out(ladder: Any) -> None:
    ablations, used = ladder.ablations, {"attention": "flash", "norm": "torch", "optimizer": "apex"}
    without = [change for change in ablations.CHANGES if ablations.changes_nothing(change, used)]
    assert [ladder.sizes.words(change) for change in without] == [
        "kernels.only.attention=flash",
        "kernels.only.weight_grad=torch",
        "kernels.only.norm=torch",
        "kernels.only.swiglu=torch",
        "kernels.only.optimizer=apex",
    ]


@pytest.fixture
def measured(ladder: Any) -> Any:
    parts = ladder.projection.Parts
    kinds = {kind: parts(0.0, 1.0, 0.0) for kind in "FIW"} | {"B": parts(0.0, 2.0, 0.0)}
    return ladder.projection.Measured(ladder.sizes.TOY, 2, 4, kinds, 1.0, 1.0)


FREE = ((0.0, 0.0), (1e30, 1e30))


@pytest.mark.parametrize(("name", "idle"), [("1f1b", 3), ("gpipe", 3), ("zb_h1", 1)])
def test_projected_bubbles_are_the_closed_forms(
    ladder: Any, measured: Any, name: str, idle: int
) -> None:
    """(p - 1) (F + I + W), or (p - 1) (F + I - W) with W moved away, beside m (F + I + W)."""
    links = ladder.projection.Links(*FREE)
    found = ladder.projection.project(measured, links, name, 8, 32)
    work, waste = 4 * 3 * 32, 4 * idle * 7
    assert found.makespan == pytest.approx(work + waste)
    assert found.bubble == pytest.approx(waste / (work + waste))
    size = replace(measured.size, layers=32)
    assert found.tflops == pytest.approx(
        32 * 2 * size.sequence * size.flops / found.makespan / 8 / 1e12
    )


def test_parts_and_stages_give_each_other(ladder: Any) -> None:
    """Times of a stage are split into those of its parts, and those make the same stage again."""
    projection = ladder.projection
    times = {"F": [7.0, 6.0, 6.0, 9.0], "I": [6.0, 6.0, 6.0, 8.0], "W": [8.0, 6.0, 6.0, 7.0]}
    times["B"] = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    parts = {kind: projection.parts_of(values, 3) for kind, values in times.items()}
    assert parts["F"] == projection.Parts(1.0, 2.0, 3.0)
    measured = projection.Measured(ladder.sizes.TOY, 2, 3, parts, 1.0, 1.0)
    links = projection.Links((1e-6, 2e-6), (1e9, 1e8))
    cost = projection.cost_on(measured, loop(2), links)
    table = cost.table(2)
    for kind, values in times.items():
        first, second = table[Kind[kind]]
        assert first + second == pytest.approx(values[0] + values[-1])
    bytes_each = 2 * 2 * 16 * 32
    assert cost.link(0, 1) == pytest.approx(1e-6 + bytes_each / 1e9)
    far = projection.cost_on(measured, vee(9), links)
    assert far.link(7, 8) == pytest.approx(2e-6 + bytes_each / 1e8)
    assert len(far.table(18)[Kind.F]) == 18


def test_what_cannot_be_projected_is_named(ladder: Any, measured: Any) -> None:
    project_all, links = ladder.projection.project_all, ladder.projection.Links(*FREE)
    one = replace(measured, layers=1)
    found = list(project_all(one, links, ["1f1b", "zb_v"], [8], 4, 60.0))
    assert found[0].schedule == "1f1b"
    assert found[1][:2] == ("zb_v", 8)
    assert "16 pipeline stages" in found[1][2]
    (late,) = project_all(one, links, ["1f1b"], [8], 4, -1.0)
    assert late == ("1f1b", 8, "no time left of -1 s")
