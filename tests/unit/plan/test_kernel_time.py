"""Seconds of kernels and collectives, from the constants of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.kernel_time import GROUPED, HOP_US, KernelTime, ring_seconds
from megapipe.plan.unit import Kernel, Transfer, Unit

NONE = {"gemm_fill": 0, "kernel_us": 0.0, "host_us": 0.0}
"""Constants that would be added to every time."""


def times_on(*keys: str, **reaches: float) -> KernelTime:
    """Return the times on an A100, or on the device of `keys`, with other constants."""
    given = parse(["plan.device=A100", "parallel.device=cuda", *keys]).config
    speeds = Speeds.of(given)
    device = speeds.known
    device = replace(device, architecture=replace(device.architecture, **reaches))
    return KernelTime(replace(speeds, device=device))


def gemm(m: int, n: int, k: int, *, name: str = "mm", dtype: str = "bfloat16") -> Kernel:
    """Return a product without bytes, so that only its FLOPs count."""
    shape = m, n, k
    return Kernel(name=name, flops=2 * m * n * k, read=0, written=0, dtype=dtype, product=shape)


def attention(heads: int, name: str = "_scaled_dot_product_flash_attention") -> Kernel:
    shape = 2048, 2048, 128
    flops = heads * 4 * 2048 * 2048 * 128
    kind = "bfloat16"
    return Kernel(name=name, flops=flops, read=0, written=0, dtype=kind, product=shape, batch=heads)


def copy(size: int) -> Kernel:
    return Kernel(name="clone", flops=0, read=size, written=size, dtype="bfloat16")


def test_one_more_tile_than_a_wave_takes_two_waves() -> None:
    """An A100 has 108 SMs; smaller tiles are too slow here to fill the second wave."""
    times = times_on(**NONE, small_tile=0.1)
    wave, more = (times.kernel(gemm(256 * tiles, 128, 4096)) for tiles in (108, 109))
    assert wave == pytest.approx(2 * 256 * 108 * 128 * 4096 / (312e12 * 0.86))
    assert more == pytest.approx(2 * wave)
    two, three = (times.kernel(gemm(256 * tiles, 128, 4096)) for tiles in (216, 217))
    assert (two, three) == (pytest.approx(2 * wave), pytest.approx(3 * wave))


def test_smaller_tiles_are_taken_if_they_end_earlier() -> None:
    """120 large tiles are two waves; 480 tiles of a quarter of their size are five waves of it."""
    shape = 256 * 12, 128 * 10, 4096
    large, best = (times_on(**NONE, small_tile=s).kernel(gemm(*shape)) for s in (0.1, 1.0))
    assert best == pytest.approx(5 / 4 / 2 * large)


def test_a_short_inner_dimension_pays_for_filling_the_pipeline() -> None:
    without, filled = (times_on(kernel_us=0.0, gemm_fill=fill) for fill in (0, 128))
    for k in (128, 1024):
        kernel = gemm(4096, 4096, k)
        assert filled.kernel(kernel) == pytest.approx((k + 128) / k * without.kernel(kernel))


def test_rows_that_are_not_aligned_are_slower() -> None:
    """In bf16, 108 values take 216 bytes, and 112 values 14 times 16 bytes."""
    times = times_on(kernel_us=0.0)
    for odd, even in (
        (gemm(2048, 2048, 108), gemm(2048, 2048, 112)),
        (gemm(2048, 108, 2048), gemm(2048, 112, 2048)),
    ):
        assert times.kernel(odd) > 1.5 * times.kernel(even)
    wide = [gemm(2048, 2048, k, dtype="float32") for k in (108, 112)]
    assert times.kernel(wide[0]) < times.kernel(wide[1]), "fp32 rows of 108 are aligned"


def test_a_kernel_takes_the_time_of_its_bytes_if_that_is_longer() -> None:
    times = times_on(kernel_us=0.0)
    rate = 2.04e12 * 0.85
    assert times.kernel(copy(10**9)) == pytest.approx(2e9 / rate)
    product = gemm(4096, 4096, 64)
    moved = product.model_copy(update={"read": 10**9})
    assert times.kernel(moved) == pytest.approx(1e9 / rate)
    assert times.kernel(product.model_copy(update={"read": 10**6})) == times.kernel(product)


def test_every_kernel_takes_a_least_time() -> None:
    assert times_on().kernel(copy(1)) == pytest.approx(4e-6, rel=1e-3)


def test_few_heads_wait_for_the_longest_block() -> None:
    times = times_on(kernel_us=0.0)
    one, two, three, many = (times.kernel(attention(heads)) for heads in (1, 2, 3, 64))
    assert three - two == pytest.approx(two - one), "time of a head"
    assert one > 3 * (two - one)
    assert many / 64 == pytest.approx(two - one, rel=0.2)


def test_attention_kernels_differ() -> None:
    times = times_on("plan.device=H100", kernel_us=0.0)
    flash, cudnn, efficient, backward = (
        times.kernel(attention(64, f"_scaled_dot_product_{name}"))
        for name in (
            "flash_attention",
            "cudnn_attention",
            "efficient_attention",
            "flash_attention_backward",
        )
    )
    assert cudnn < flash < efficient
    assert flash < backward, "for as many FLOPs"


@pytest.mark.parametrize(
    ("device", "dtype", "ratio"),
    [
        ("A100", "float32", 16.0),
        ("A100", "float16", 1.0),
        ("H100", "float8_e4m3fn", 0.5),
        ("A100", "float8_e4m3fn", 1.0),
    ],
)
def test_types_have_different_peaks(device: str, dtype: str, ratio: float) -> None:
    times = times_on(f"plan.device={device}", kernel_us=0.0)
    assert times.kernel(gemm(4096, 4096, 4096, dtype=dtype)) == pytest.approx(
        ratio * times.kernel(gemm(4096, 4096, 4096))
    )


def test_grouped_products_are_slower() -> None:
    times = times_on(kernel_us=0.0)
    plain, grouped = (times.kernel(gemm(4096, 4096, 4096, name=n)) for n in ("mm", "_grouped_mm"))
    assert grouped == pytest.approx(plain / GROUPED)


def test_the_factor_scales_every_time() -> None:
    calls = [gemm(4096, 4096, 512), copy(10**7), attention(4)]
    once, twice = times_on().of(calls), times_on("plan.time_factor=2").of(calls)
    assert twice == pytest.approx([2 * each for each in once])
    assert min(once.gemm, once.attention, once.bytes, once.host) > 0
    assert times_on("plan.time_factor=2").moved(1e9) == pytest.approx(2 * times_on().moved(1e9))


def test_compiled_blocks_join_neighbours_that_move_bytes() -> None:
    times = times_on(kernel_us=0.0)
    calls = [copy(10**8), copy(3 * 10**8), gemm(512, 512, 512), copy(10**8)]
    plain, compiled = times.of(calls), times.of(calls, compiled=True)
    assert plain.bytes == pytest.approx(times.moved(2 * 5e8))
    assert compiled.bytes == pytest.approx(times.moved(2 * 4e8)), "the largest of a group"
    assert compiled.gemm == plain.gemm
    assert (plain.host, compiled.host) == (pytest.approx(4 * 7e-6), pytest.approx(3 * 7e-6))


def test_an_operation_takes_at_least_the_time_of_the_host() -> None:
    times = times_on()
    small = times.of([copy(1)] * 10)
    assert small.device == pytest.approx(10 * 4e-6, rel=1e-3)
    assert small.seconds == small.host == pytest.approx(10 * 7e-6)
    large = times.of([copy(10**9)] * 10)
    assert large.seconds == large.device > large.host


def test_an_operation_is_the_sum_of_its_kernels_without_collectives() -> None:
    sent = Transfer(kind="all_reduce", axis="tp", members=2, span=2, bytes=10**9, dtype="bfloat16")
    kernels = [gemm(4096, 4096, 4096), copy(10**8)]
    operations = {"F": (kernels[0], sent, kernels[1])}
    unit = Unit(held=0, host=0, queued=0, kept=0, gradient=0, peaks={}, operations=operations)
    times = times_on()
    assert times.seconds("F", unit) == pytest.approx(sum(map(times.kernel, kernels)))
    assert times.seconds("W", unit) == 0


def test_of_an_unknown_device_only_the_peak_counts() -> None:
    """Every kernel with FLOPs reaches 60% of it, of any shape and type; nothing else takes time."""
    keys = "plan.device=nobody's", "plan.peak_tflops=1", "parallel.device=cuda"
    times = KernelTime(Speeds.of(parse(list(keys)).config))
    for kernel in (
        gemm(100, 33, 7),
        gemm(256 * 109, 128, 64, dtype="float32"),
        gemm(4096, 4096, 4096, name="_grouped_mm"),
        attention(1),
        attention(1, "_scaled_dot_product_flash_attention_backward"),
    ):
        found = times.of([kernel, copy(10**9)])
        assert found.seconds == pytest.approx(kernel.flops / 0.6e12, rel=1e-12), kernel.name


def test_a_device_without_a_peak_is_refused() -> None:
    given = parse(["plan.device=nobody's", "parallel.device=cuda"]).config
    with pytest.raises(ConfigError, match="speed of the device is not known"):
        KernelTime(Speeds.of(given))


def of_16(*keys: str) -> Config:
    """Resolve a job of 16 processes on nodes of 8, whose links carry 100 and 10 GB/s."""
    links = "plan.intra_node_gb_s=100", "plan.inter_node_gb_s=10"
    sizes = "model.layers=1", "parallel.dp=16", "train.global_batch=16", "train.microbatch=1"
    return resolve(parse([*sizes, *links, *keys]).config, None, None)[0]


def test_a_ring_takes_a_latency_for_each_hop_between_nodes() -> None:
    config = of_16("plan.link_latency_us=20")
    assert ring_seconds(config, 1e9, 8, 8) == pytest.approx(0.01 + 20e-6)
    assert ring_seconds(config, 1e9, 16, 16) == pytest.approx(0.1 + 20e-6 + 14 * HOP_US / 1e6)
    assert ring_seconds(config, 0.0, 2, 16) == pytest.approx(20e-6)
    assert ring_seconds(config, 1e9, 1, 1) == 0, "nobody to send to"


def test_without_a_latency_a_ring_takes_the_time_of_its_bytes() -> None:
    config = of_16("plan.link_latency_us=0")
    assert ring_seconds(config, 1e9, 8, 8) == pytest.approx(0.01)
    assert ring_seconds(config, 1e9, 16, 16) == pytest.approx(0.1)
