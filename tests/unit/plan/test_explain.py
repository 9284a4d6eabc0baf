"""Where the time of a planned step goes (megapipe plan --explain): the parts add up, by what the
planner prices."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds, known_speeds
from megapipe.plan.cache import Cache
from megapipe.plan.kernel_time import KernelTime
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import step_figures
from megapipe.plan.search.command import main
from megapipe.plan.search.explain import costliest_kernels, step_shares
from megapipe.plan.step_time import simulate_step
from megapipe.plan.unit import Kernel
from megapipe.plan.units import Units
from tests.parity.searches import search_of

MODEL = (
    *("model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab_size=1000"),
    *("model.dtype=bf16", "train.sequence_length=512", "train.global_batch=16"),
    *("plan.device=H100", "parallel.device=cuda", "parallel.ranks_per_node=4"),
)
COMPUTED = ("GEMMs", "attention", "kernels that only move bytes")
WAITS = "waits for other ranks: bubble, messages"
LAYOUTS = {
    "one process": (),
    "recomputed": ("activations.policy=full",),
    "tp 2, interleaved": (
        *("parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"),
        *("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"),
    ),
    "zero bubble": ("parallel.pp=4", "pipeline.schedule=zb_h1"),
    "post-validation": (
        *("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=zb_h1"),
        *("optimizer.post_validation=true", "plan.intra_node_gb_s=1"),
    ),
    "an uneven ring": ("parallel.cp=2", "context.position_split=contiguous"),
    "experts": ("model.moe.num_experts=4", "parallel.dp=2", "parallel.ep=2"),
}


def planned(*words: str) -> tuple[Units, Speeds]:
    config = parse([*MODEL, *words]).config
    parallel = config.parallel
    world = (parallel.dp or 1) * parallel.tp * parallel.pp * parallel.cp
    config, layout = resolve(config, world, None, measure=BY_UNITS)
    return Units(config, layout, Cache([])), known_speeds(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_are_the_step(layout: str) -> None:
    units, speeds = planned(*LAYOUTS[layout])
    timeline = simulate_step(units, speeds)
    figures = step_figures(units, speeds, timeline)
    assert figures is not None
    rank, shares = step_shares(units, speeds)
    assert timeline.busy[rank] == max(timeline.busy)
    assert sum(shares.values()) == pytest.approx(figures.seconds, rel=1e-12)
    assert min(shares.values()) >= -1e-9 * figures.seconds
    kernels = costliest_kernels(units, speeds, rank)
    times = [each.seconds for each in kernels]
    assert times == sorted(times, reverse=True)
    whole = sum(shares[name] for name in COMPUTED)
    assert sum(times) == pytest.approx(whole, rel=1e-9 if units.layout.cp == 1 else 0.1)
    assert ("collectives of tp that nothing overlaps" in shares) == (layout == "tp 2, interleaved")
    if layout == "one process":
        assert shares[WAITS] == pytest.approx(0, abs=1e-9 * figures.seconds)
    if layout == "recomputed":
        _, kept = step_shares(*planned())
        assert shares["GEMMs"] > 1.1 * kept["GEMMs"]
    if layout == "zero bubble":
        assert shares[WAITS] > 0.02 * figures.seconds


@pytest.mark.parametrize("size", [(4096, 8192, 1024), (33792, 128, 512), (200, 72, 64)])
@pytest.mark.parametrize("batch", [1, 5])
def test_wave_loss_is_the_time_above_that_of_the_result(
    size: tuple[int, int, int], batch: int
) -> None:
    _, speeds = planned()
    kernels, (m, n, k) = KernelTime(speeds), size
    gemm = Kernel(
        name="mm", flops=2 * batch * m * n * k, read=0, written=0, dtype="bfloat16",
        product=size, batch=batch,
    )  # fmt: skip
    loss = kernels.wave_loss(gemm)
    assert loss is not None
    assert 0 <= loss < 1
    assert (loss == 0) == (size == (33792, 128, 512)), "132 tiles of 256 x 128, one for each unit"
    reaches = kernels.reaches
    result = 2 * batch * m * n * (k + reaches.gemm_fill) / (speeds.known.tflops * 1e12)
    taken = kernels.kernel(gemm) - reaches.kernel_us / 1e6
    assert taken * (1 - loss) == pytest.approx(result / reaches.gemm, rel=1e-9)
    assert kernels.wave_loss(gemm.model_copy(update={"product": None})) is None


def test_the_fastest_layout_that_does_not_fit(tmp_path: Path) -> None:
    words = [*MODEL, "plan.device_gb=1.28"]
    fixed = {"activations.policy": "keep", "train.microbatch": "4", "parallel.tp": "1"}
    search = search_of(words, fixed, 4, Cache([tmp_path]))
    found = search.run(3)
    room = search.speeds.plannable_bytes
    assert found.best
    assert room is not None
    least = search.too_large(inf)
    assert least is not None
    assert least.bytes > room
    assert all(each.choice != least.choice for each in found.best)
    assert search.too_large(least.seconds) is None


def test_the_command_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    argv = [*MODEL, "--gpus", "4", "--top", "2", "train.microbatch=4", "activations.policy=keep"]
    argv += ["parallel.pp=2", "parallel.cp=1"]
    assert main([*argv, "--explain", "2"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    table, _, text = out.partition("layout 2: ")
    step = float(table.splitlines()[2].split()[1])
    together = next(line for line in text.splitlines() if line.startswith("together"))
    assert float(together.split()[1]) == pytest.approx(1000 * step, rel=5e-3)
    assert "kernels that take most" in text
    assert "left of what a plan may use" in text
    assert "layout 1 takes " in text
    for words, error in (
        (("--explain", "3"), "--explain 3: expected 1 to 2"),
        (("--explain", "--json"), "--explain prints text: expected no --json beside it"),
    ):
        assert main([*argv, *words]) == 2
        assert error in capsys.readouterr().err
