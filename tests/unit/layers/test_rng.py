"""Random numbers are functions of their coordinates alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.distributed.mesh import Axis
from megapipe.layers.dropout import dropout, dropout_seed
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import TILE_COLUMNS, TILE_ROWS, draw_normal, seed_of, seeded, uniform


def test_numbers_of_coordinates_are_those_of_splitmix64() -> None:
    """Written with whole numbers of Python; and about as even as numbers at random."""
    numbers = torch.arange(-50, 20_000)
    seed = seed_of(7, "jitter", 3, 1)
    found = uniform(seed, numbers)
    assert found.dtype == torch.float32
    for number, value in zip(numbers.tolist()[:300], found.tolist()[:300], strict=True):
        z = (number * 0x9E3779B97F4A7C15 + seed) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        assert value == ((z ^ z >> 31) >> 40) / 2**24
    counts = torch.histc(found, 10, 0, 1)
    assert counts.sum() == len(numbers)
    assert (counts - len(numbers) / 10).abs().max() < 5 * (len(numbers) / 10) ** 0.5
    assert 0 <= found.min() <= found.max() < 1


SHAPE = (2 * TILE_ROWS + 9, 2 * TILE_COLUMNS + 5)


def draw(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    seed: int = 5,
    name: str = "a.weight",
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    std: float = 0.5,
) -> torch.Tensor:
    out = torch.full(sizes, float("nan"), dtype=dtype)
    draw_normal(out, seed, name, shape, offsets, std)
    return out


def test_a_seed_begins_with_the_same_weights_in_every_version() -> None:
    """Corners of tiles are compared; kernels of other processors may round otherwise."""
    found = draw((0, 0), (137, 1029), shape=(137, 1029))
    expected = {(0, 0): -0.76294, (63, 0): -1.13391, (64, 0): 0.22359, (0, 511): 0.54822}
    expected |= {(0, 512): 0.41394, (136, 1028): -0.06008}
    for place, value in expected.items():
        assert found[place].item() == pytest.approx(value, abs=1e-4)


WHOLE = draw((0, 0), SHAPE)


@settings(max_examples=30)
@given(st.data())
def test_a_box_is_a_part_of_the_whole(data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, n - 1)) for n in SHAPE]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, SHAPE, strict=True)]
    sizes = tuple(b - a for a, b in zip(starts, stops, strict=True))
    box = draw((starts[0], starts[1]), sizes)
    assert box.equal(WHOLE[starts[0] : stops[0], starts[1] : stops[1]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_drawn_in_fp32_and_cast(dtype: torch.dtype) -> None:
    assert draw((0, 0), SHAPE, dtype=dtype).equal(WHOLE.to(dtype))


def test_values_are_normal() -> None:
    assert abs(WHOLE.std().item() / 0.5 - 1) < 0.01
    assert abs(WHOLE.mean().item()) < 0.005


def test_tiles_names_seeds_and_planes_differ() -> None:
    def first_tile(values: torch.Tensor) -> bytes:
        return values[:9, :5].contiguous().numpy().tobytes()

    rows, columns = range(0, SHAPE[0], TILE_ROWS), range(0, SHAPE[1], TILE_COLUMNS)
    tiles = [WHOLE[i:, j:] for i in rows for j in columns]
    assert len(tiles) == 9
    planes = draw((0, 0, 0), (2, 9, 5), shape=(2, *SHAPE))
    others = [draw((0, 0), (9, 5), name="b.weight"), draw((0, 0), (9, 5), seed=6), *planes]
    assert len({first_tile(values) for values in [*tiles, *others]}) == 13
    assert draw((1, 0, 0), (1, 9, 5), shape=(2, *SHAPE))[0].equal(planes[1])


def test_what_lies_beyond_the_shape_is_zero() -> None:
    padded = draw((SHAPE[0] - 4, 0), (16, SHAPE[1]))
    assert padded[:4].equal(WHOLE[-4:])
    assert not padded[4:].any()
    assert not draw((SHAPE[0], 0), (8, 8)).any(), "a box that is all padding"


def test_drawing_leaves_the_default_generator_alone() -> None:
    before = torch.random.get_rng_state()
    draw((0, 0), (3, 3))
    assert torch.random.get_rng_state().equal(before)


def test_seeded_restores_the_generator() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with seeded(cpu, 99):
        inside = torch.rand(4)
    assert torch.random.get_rng_state().equal(before)
    with seeded(cpu, 99):
        assert torch.rand(4).equal(inside), "the same seed gives the same numbers"

    def fail() -> None:
        with seeded(cpu, 98):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.random.get_rng_state().equal(before), "after an error too"


def test_seeds_of_different_coordinates_differ() -> None:
    coordinates = [
        (seed, purpose, step, microbatch, layer, tp)
        for seed in (1, 12)
        for purpose in ("embedding", "attention")
        for step in (0, 1, 11)
        for microbatch in (0, 1, 11)
        for layer in (0, 1, 11)
        for tp in (0, 1)
    ]
    seeds = [seed_of(*each) for each in coordinates]
    assert len(set(seeds)) == len(coordinates)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, 23) != seed_of(12, 3), "coordinates do not run into each other"
    assert seed_of(7, "init", "x", 0, 1) == 8028339980796834415, "for ever: resumed runs rely on it"


def test_dropout_depends_on_the_tp_rank_only_where_the_sequence_is_split() -> None:
    mb = MicroBatch(index=3, step=2, seed=1)
    x = torch.ones(8, 2, 16)

    def drop(tp_index: int, sequence_parallel: bool, purpose: str = "mlp_out") -> torch.Tensor:
        tp = Axis(size=2, index=tp_index, ranks=(0, 1), group=None)
        return dropout(x, 0.5, mb, purpose, 0, Sharding(tp, sequence_parallel, torch.float32))

    assert drop(0, False).equal(drop(1, False))
    assert not drop(0, True).equal(drop(1, True))
    assert not drop(0, False).equal(drop(0, False, "attention_out"))
    assert set(drop(0, False).unique().tolist()) == {0.0, 2.0}
    assert dropout_seed(mb, "mlp_out", 0, 0) != dropout_seed(mb, "mlp_out", 1, 0)
